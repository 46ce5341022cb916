"""Trees of arrays as files: ``tree.json`` has their structure, ``arrays-<process>.safetensors`` their bytes.

    layout, parts = describe(tree)                    # what to write; the parts are on the host
    write_parts(file, parts)                          # this process' shards, as a safetensors file
    tree = rebuild(layout, [file.read() ...], like)

Each shard of an array is written once, by the process with its first replica; its name in the file is the number of the
leaf and the start of the shard (``3@0,128``). So arrays may be distributed over processes in any way, and restored with
another sharding; each process then reads all shards. Nothing is pickled.

Dictionaries with string keys, lists, tuples and None are rebuilt as they were. Any other node, such as a class of Flax
or Optax, needs ``like``, a tree of the same structure.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from operator import gt
from typing import Any, Final, NamedTuple, Protocol

import jax
import ml_dtypes
import numpy as np

from raftkv.errors import ConfigError

FORMAT: Final = 1
_NAMES: Final = {
    "BOOL": np.dtype(np.bool_),
    **{f"{letter}{bits}": np.dtype(f"{kind}{bits // 8}") for bits in (8, 16, 32, 64) for letter, kind in ("Ii", "Uu")},
    **{f"F{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "C64": np.dtype(np.complex64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""Names of dtypes in safetensors."""
_DTYPES: Final = {dtype: name for name, dtype in _NAMES.items()}
_PART: Final = re.compile(r"([0-9]{1,9})@((?:[0-9]{1,18}(?:,[0-9]{1,18})*)?)")
_MALFORMED: Final = (
    KeyError, ValueError, TypeError, IndexError, AttributeError, struct.error, MemoryError, RecursionError,
)  # fmt: skip
_SCALARS: Final = {"bool": bool, "int": int, "float": float}


class Part(NamedTuple):
    """One shard of one leaf, on the host."""

    name: str
    data: Any


class Target(Protocol):
    """A target for parts."""

    def write(self, data: Any) -> int:
        """Write bytes."""
        ...


def describe(tree: Any) -> tuple[dict[str, Any], list[Part]]:
    """Return the structure of a tree as JSON, and the shards that this process writes, copied to the host.

    Raises:
        ConfigError: a leaf is neither an array nor a number.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    parts: list[Part] = []
    described = []
    for number, (path, leaf) in enumerate(leaves):
        name = jax.tree_util.keystr(path)
        leaf_is = _describe_leaf(name, leaf)
        described.append({"path": name, **leaf_is})
        parts += _parts(number, _plain(leaf))
    return {"format": FORMAT, "leaves": described, "structure": _structure(tree)}, parts


def _describe_leaf(path: str, leaf: Any) -> dict[str, Any]:
    if _is_key(leaf):
        data = jax.random.key_data(leaf)
        return {"dtype": _DTYPES[data.dtype], "shape": list(data.shape), "key": str(jax.random.key_impl(leaf))}
    scalar = next((name for name, kind in _SCALARS.items() if type(leaf) is kind), None)
    array = _plain(leaf)
    if not isinstance(array, np.ndarray | jax.Array) or np.dtype(array.dtype) not in _DTYPES:
        what = f"an array of {array.dtype}" if hasattr(array, "dtype") else f"a {type(leaf).__name__}"
        raise ConfigError(f"{path or 'the tree'} is {what}; save arrays of numbers, and numbers")
    found = {"dtype": _DTYPES[np.dtype(array.dtype)], "shape": list(array.shape)}
    return {**found, "scalar": scalar} if scalar else found


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> Any:
    """Return a leaf as an array with a dtype that can be written as bytes."""
    if _is_key(leaf):
        return jax.random.key_data(leaf)
    return np.asarray(leaf) if type(leaf) in _SCALARS.values() or isinstance(leaf, np.generic) else leaf


def _parts(number: int, array: Any) -> list[Part]:
    if isinstance(array, np.ndarray):  # every process has it, and the first one writes it
        own = [((0,) * array.ndim, array.copy())] if jax.process_index() == 0 else []
    else:
        shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
        own = [(tuple(each.start or 0 for each in shard.index), np.array(shard.data)) for shard in shards]
    return [Part(f"{number}@{','.join(map(str, start))}", data) for start, data in own]


def _structure(tree: Any) -> Any:
    """Return the nodes of a tree as JSON; None for nodes that need ``like`` to be rebuilt."""
    count = iter(range(jax.tree_util.tree_structure(tree).num_leaves))
    try:
        return _node(tree, count)
    except TypeError:
        return None


def _node(node: Any, count: Any) -> Any:
    if node is None:
        return {"none": True}
    if type(node) is dict and all(isinstance(key, str) for key in node):
        return {"dict": {key: _node(node[key], count) for key in sorted(node)}}
    if type(node) in (list, tuple):
        return {type(node).__name__: [_node(child, count) for child in node]}
    if not jax.tree_util.all_leaves([node]):
        raise TypeError
    return next(count)


# ---- files


def write_parts(file: Target, parts: Sequence[Part]) -> None:
    """Write shards as one safetensors file."""
    header: dict[str, Any] = {}
    end = 0
    for name, data in parts:
        header[name] = {"dtype": _DTYPES[data.dtype], "shape": data.shape, "data_offsets": [end, end + data.nbytes]}
        end += data.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for _, data in parts:
        file.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8))


def read_parts(data: bytes) -> Iterable[Part]:
    """Return the shards of a safetensors file, as views of its bytes."""
    (length,) = struct.unpack("<Q", data[:8])
    for name, said in json.loads(data[8 : 8 + length]).items():
        first, end = (8 + length + offset for offset in said["data_offsets"])
        view = np.frombuffer(memoryview(data)[first:end], np.uint8).view(_NAMES[said["dtype"]])
        yield Part(name, view.reshape(said["shape"]))


def rebuild(layout: Mapping[str, Any], files: Iterable[bytes], like: Any = None) -> Any:
    """Rebuild a tree from its files.

    Arguments:
        layout: result of ``describe``.
        files: files of all processes.
        like: a tree of the same structure, whose arrays (or ``jax.ShapeDtypeStruct``) give shapes and shardings; None:
            only plain containers are rebuilt, on the default device. Arrays that JAX cannot represent are numpy arrays.

    Raises:
        ConfigError: ``like`` has another structure, shape or dtype, or is required; or the files are of a later version
            or another format; or a shard is missing, or belongs to no array.
    """
    if isinstance(layout, dict) and layout.get("format", FORMAT) != FORMAT:
        raise ConfigError(f"format {layout.get('format')!r} of a tree is of another version of raftkv")
    try:
        leaves = [{"path": "", **leaf} for leaf in layout["leaves"]]
        arrays = [np.zeros(leaf["shape"], _NAMES[leaf["dtype"]]) for leaf in leaves]
        sizes: dict[str, int] = {}
        for data in files:
            for name, part in read_parts(data):
                _shard(leaves, arrays, name, part)[...] = part
                sizes[name] = part.size
    except _MALFORMED as error:
        raise ConfigError(f"the files are not those of a tree: {type(error).__name__}: {error}") from None
    _check_whole(leaves, arrays, sizes)
    if like is None:
        if layout.get("structure") is None:
            raise ConfigError(
                "the checkpoint has nodes of a class; give restore(like=...) a tree of the same structure"
            )
        values = [_value(leaf, array, None) for leaf, array in zip(leaves, arrays, strict=True)]
        try:
            return _from_structure(layout["structure"], values)
        except _MALFORMED as error:
            raise ConfigError(f"the files are not those of a tree: {type(error).__name__}: {error}") from None
    wanted, treedef = jax.tree_util.tree_flatten_with_path(like)
    paths = [jax.tree_util.keystr(path) for path, _ in wanted]
    if paths != [leaf["path"] for leaf in leaves]:
        other = sorted({*paths} ^ {leaf["path"] for leaf in leaves})
        raise ConfigError(f"the tree is another than that of the checkpoint: only one of them has {other[:1]}")
    values = [_value(leaf, array, target) for leaf, array, (_, target) in zip(leaves, arrays, wanted, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, values)


def _shard(leaves: Sequence[Mapping[str, Any]], arrays: Sequence[Any], name: str, part: Any) -> Any:
    """Return the slices of a shard in its array. Raises ConfigError if number, dtype or size do not match."""
    found = _PART.fullmatch(name)
    number = int(found[1]) if found else len(arrays)
    begin = [int(at) for at in found[2].split(",") if at] if found else []
    if number >= len(arrays):
        raise ConfigError(f"shard {name!r} is of none of the {len(arrays)} leaves of the tree")
    array = arrays[number]
    ends = [at + size for at, size in zip(begin, part.shape, strict=False)]
    if part.dtype != array.dtype or not len(begin) == part.ndim == array.ndim or any(map(gt, ends, array.shape)):
        raise ConfigError(
            f"shard {name!r} of {leaves[number]['path'] or 'the tree'} has the shape {part.shape} of {part.dtype}, and "
            f"does not fit into {array.shape} of {array.dtype}"
        )
    return array[(*map(slice, begin, ends), ...)]


def _check_whole(leaves: Sequence[Mapping[str, Any]], arrays: Sequence[Any], sizes: Mapping[str, int]) -> None:
    """Refuse arrays with missing shards, which would be zeros. Shards of one array do not overlap."""
    found = [0] * len(leaves)
    for name, size in sizes.items():
        found[int(name.partition("@")[0])] += size
    for leaf, array, size in zip(leaves, arrays, found, strict=True):
        if size != array.size:
            raise ConfigError(
                f"{leaf['path'] or 'the tree'} is not whole in the checkpoint: its shards have {size} of {array.size} "
                "elements; a process saved none, or another tree; restore another step"
            )


def _value(leaf: Mapping[str, Any], array: Any, target: Any) -> Any:
    """Return the value of a leaf. Raises ConfigError if it does not match the target."""
    if "key" in leaf:
        value: Any = jax.random.wrap_key_data(jax.numpy.asarray(array), impl=leaf["key"])
        if target is not None:
            _check_like(leaf, value, target)
        return value
    if target is not None:
        _check_like(leaf, array, target)
    if "scalar" in leaf:
        return _SCALARS[leaf["scalar"]](array.item())
    if isinstance(target, np.ndarray):
        return array
    # Without ``jax_enable_x64`` JAX truncates 64-bit numbers, which numpy arrays may have, to 32 bits.
    held = jax.dtypes.canonicalize_dtype(array.dtype)
    if held != array.dtype and getattr(target, "dtype", None) == held:
        array = _narrowed(leaf, array, held)
    sharding = getattr(target, "sharding", None)
    if sharding is None:
        return jax.numpy.asarray(array) if held == array.dtype else array
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _check_like(leaf: Mapping[str, Any], value: Any, target: Any) -> None:
    shape = () if type(target) in _SCALARS.values() else getattr(target, "shape", value.shape)
    held = value.dtype if _is_key(value) else jax.dtypes.canonicalize_dtype(value.dtype)
    dtype = getattr(target, "dtype", held)
    if tuple(shape) == value.shape and dtype in (held, value.dtype):
        return
    there, wanted = (value.shape, tuple(shape)) if tuple(shape) != value.shape else (value.dtype, dtype)
    what = "shape" if there == value.shape else "dtype"
    raise ConfigError(f"{leaf['path']} has the {what} {there} in the checkpoint, and {wanted} is wanted")


def _narrowed(leaf: Mapping[str, Any], array: Any, dtype: Any) -> Any:
    """Convert to a narrower dtype. Raises ConfigError if integers do not fit; other numbers only lose precision."""
    found = array.astype(dtype)
    if found.dtype.kind in "iu" and not np.array_equal(found, array):
        raise ConfigError(f"{leaf['path']} has numbers beyond {dtype} in the checkpoint; set jax_enable_x64")
    return found


def _from_structure(node: Any, values: Sequence[Any]) -> Any:
    if isinstance(node, int):
        return values[node]
    ((kind, inner),) = node.items()
    if kind == "dict":
        return {key: _from_structure(child, values) for key, child in inner.items()}
    if kind == "none":
        return None
    children = [_from_structure(child, values) for child in inner]
    return tuple(children) if kind == "tuple" else children
