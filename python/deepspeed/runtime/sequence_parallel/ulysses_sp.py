"""Import path of existing scripts."""

from deepspeed.sequence.hf_attention import UlyssesSPAttentionHF  # noqa: F401
from deepspeed.sequence.loader import UlyssesSPDataLoaderAdapter  # noqa: F401
from deepspeed.sequence.tiled import TiledFusedLogitsLoss, TiledMLP, sequence_tiled_compute  # noqa: F401
