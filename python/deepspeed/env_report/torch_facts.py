"""Facts about torch, asked in a process of its own: it may be missing, broken or slow to import."""

import json
import subprocess
import sys

_PROGRAM = """
import json, os, sys
facts = {}
try:
    import torch
    import torch.distributed as dist
    from deepspeed.host.blas import blas_in_use, blas_warning
    from deepspeed.host.product_error import bf16_products, product_warning
    facts["version"] = str(torch.__version__)
    facts["folder"] = os.path.dirname(torch.__file__)
    facts["tag"] = "cp%d%d-torch%s" % (*sys.version_info[:2], str(torch.__version__).split("+")[0])
    facts["cuda"] = torch.version.cuda
    facts["hip"] = getattr(torch.version, "hip", None)
    facts["threads"] = torch.get_num_threads()
    facts["blas"] = blas_in_use()
    facts["blas_warning"] = blas_warning()
    facts["bf16_products"], facts["product_warning"] = bf16_products(), product_warning()
    facts["mkldnn"] = torch.backends.mkldnn.is_available()
    facts["backends"] = [name for name in ("gloo", "nccl", "mpi", "ucc")
                         if dist.is_available() and getattr(dist, "is_%s_available" % name, lambda: name == "gloo")()]
    facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if facts["cuda"] else []
    if facts["cuda"] and "nccl" in facts["backends"]:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as error:
    facts["error"] = "%s: %s" % (type(error).__name__, error)
try:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.accelerator.real_accelerator import accelerators
    facts["accelerators"] = {name: accelerators.why_not(name) for name in accelerators.in_order()}
    facts["accelerator"] = get_accelerator()._name
except Exception as error:
    facts["accelerator"] = "none: %s" % error
try:
    from deepspeed import _native
    facts["native"] = os.path.basename(_native._C.__file__)
except Exception as error:
    facts["native_error"] = "%s: %s" % (type(error).__name__, error)
try:
    from deepspeed.ops.op_builder.status import report
    facts["ops"] = report()
except Exception as error:
    facts["ops_error"] = "%s: %s" % (type(error).__name__, error)
print()
print(json.dumps(facts))
"""


def torch_facts():
    """A dict; ``error`` says why torch cannot be imported, ``native_error`` why our module cannot, ``ops_error`` why
    the op builders cannot; ``ops`` is a list of [name, installed, compatible, why not]."""
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=False
        )
        return json.loads(asked.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": "`import torch` did not come back within two minutes"}
    except (ValueError, IndexError):
        last = (asked.stderr.strip().splitlines() or ["nothing was printed"])[-1]
        return {"error": f"`import torch` ended with exit code {asked.returncode}: {last}"}
