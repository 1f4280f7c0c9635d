"""Files of torch.save and safetensors, read and written tensor by tensor: the Python side of ``csrc/formats``."""
