"""Kinds of checkpoints: what the files of one are, so that a reader finds what it can load.

Each kind of a run has a ``latest`` of its own: who serves wants a graph with its variables, who resumes the variables.
"""

from __future__ import annotations

from typing import Final

from raftkv.errors import ConfigError

DCP: Final = "dcp"
DCP_PER_RANK: Final = "dcp_per_rank"
TORCH_SAVE: Final = "torch_save"
SAFETENSORS: Final = "safetensors"
MEGATRON_DIST: Final = "megatron_dist"
DEEPSPEED_ZERO: Final = "deepspeed_zero"
ORBAX: Final = "orbax"
TF_VARIABLES: Final = "tf_variables"
TF_SAVEDMODEL: Final = "tf_savedmodel"
TF_FROZEN: Final = "tf_frozen"
FILES: Final = "files"

KINDS: Final = {
    DCP: "torch.distributed.checkpoint: .distcp files and one .metadata",
    DCP_PER_RANK: "torch.distributed.checkpoint without collectives: a .metadata for each rank",
    TORCH_SAVE: "files of torch.save",
    SAFETENSORS: "safetensors files, as Hugging Face writes them",
    MEGATRON_DIST: "Megatron's distributed checkpoint",
    DEEPSPEED_ZERO: "DeepSpeed ZeRO: a file of optimizer states for each rank",
    ORBAX: "Orbax or another tree of arrays of JAX",
    TF_VARIABLES: "TensorFlow variables: .index and .data files",
    TF_SAVEDMODEL: "TensorFlow SavedModel: graph and variables",
    TF_FROZEN: "TensorFlow frozen graph: variables as constants",
    FILES: "files of any other sort",
}
"""Name and meaning of each kind."""


def check_kind(kind: str) -> str:
    """Return the name of a kind.

    Raises:
        ConfigError: there is none of that name.
    """
    if kind not in KINDS:
        raise ConfigError(f"{kind!r} is no kind of checkpoint; there are {', '.join(KINDS)}")
    return kind
