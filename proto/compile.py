"""Compile ``proto/*.proto`` into ``raftkv/pb``: the descriptor set, the module shims and their type stubs.

python proto/compile.py           write them
python proto/compile.py --check   write nothing; exit 1 and name the files that are not current
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("raftkv/pb")
SHIM = '''"""Messages of proto/{name}.proto; their types are in {name}_pb2.pyi."""

from raftkv.pb._pool import export

export("{name}", globals())
'''


def compile_into(root: Path) -> None:
    """Write everything generated below ``root``/raftkv/pb."""
    names = sorted(path.stem for path in (ROOT / "proto").glob("*.proto"))
    (root / PACKAGE).mkdir(parents=True, exist_ok=True)
    arguments = [
        "protoc",
        f"-I{PACKAGE}={ROOT / 'proto'}",
        f"-I{_folder_of('google.api')}",
        f"-I{_folder_of('grpc_tools._proto')}",
        f"--descriptor_set_out={root / PACKAGE / 'descriptors.bin'}",
        "--include_imports",
        f"--pyi_out={root}",
        *(f"{PACKAGE}/{name}.proto" for name in names),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit(1)
    for name in names:
        (root / PACKAGE / f"{name}_pb2.py").write_text(SHIM.format(name=name))
        _leave_out_annotations(root / PACKAGE / f"{name}_pb2.pyi")


def _folder_of(package: str) -> Path:
    """The folder from which the files of an installed package are imported, such as ``google/api/http.proto``."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed; `pip install -e .[dev]`")
    folder = Path(next(iter(spec.submodule_search_locations)))
    return folder if package.endswith("_proto") else folder.parents[1]


def _leave_out_annotations(stub: Path) -> None:
    """Only the descriptors carry the paths of HTTP: no type of google.api is used, nor installed beside raftkv."""
    lines = stub.read_text().splitlines(keepends=True)
    stub.write_text("".join(line for line in lines if not line.startswith("from google.api import ")))


def stale_files() -> list[str]:
    """Names of generated files that differ from what the compiler makes of ``proto/`` now."""
    with tempfile.TemporaryDirectory() as folder:
        compile_into(Path(folder))
        fresh = {path.name: path.read_bytes() for path in (Path(folder) / PACKAGE).iterdir()}
    current = {path.name: path.read_bytes() for path in (ROOT / PACKAGE).glob("*_pb2.py*")}
    current["descriptors.bin"] = (ROOT / PACKAGE / "descriptors.bin").read_bytes()
    return sorted(name for name in fresh.keys() | current.keys() if fresh.get(name) != current.get(name))


def main() -> None:
    """Compile, or check with ``--check``."""
    if "--check" not in sys.argv[1:]:
        compile_into(ROOT)
        return
    stale = stale_files()
    if stale:
        raise SystemExit(f"not current, run `make proto`: {', '.join(stale)}")


if __name__ == "__main__":
    main()
