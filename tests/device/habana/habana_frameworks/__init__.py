"""The package of Gaudi, as far as deepspeed asks for it, over the stand-in device with torch's type hpu."""
