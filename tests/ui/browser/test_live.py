"""Open pages follow: a run that fails over, a commit, a lock that is handed on, a member that is killed."""

from __future__ import annotations

import signal
import sys

import pytest

import raftkv
from raftkv.checkpoint.keys import RANDOM_DIGITS, AttemptId, RegistryKeys
from raftkv.checkpoint.records import Checkpoint, Latest
from raftkv.client.operations import Put
from raftkv.training.records import GenerationRecord, Member, Node, RunKeys, State
from tests.cli.programs import Running, raftkvctl
from tests.procs import RAFTKV, Cluster, wait_for
from tests.ui.browser.chromium import Chromium, Page
from tests.ui.browser.world import RUN, VIEWS, World

pytestmark = pytest.mark.long

JOB = "jobs/failover"
WAITING = "import signal; signal.pause()"


def origins(cluster: Cluster) -> tuple[str, ...]:
    return tuple(f"http://{endpoint}" for endpoint in cluster.endpoints)


def node(cluster: Cluster, name: str) -> Running:
    """A node of the run whose one worker waits for a signal."""
    words = ["run", "exec", "--job", JOB, "--nnodes", "1:2", "--node-name", name, "--local-addr", "127.0.0.1"]
    conf = ["--conf", "lease_ttl=10,last_call_timeout=1"]
    return Running([*raftkvctl(",".join(cluster.endpoints), *words, *conf), "--", sys.executable, "-S", "-c", WAITING])


def test_a_run_that_fails_over_is_seen_in_the_open_page(chromium: Chromium, cluster: Cluster, world: World) -> None:
    with (
        node(cluster, "alpha") as alpha,
        node(cluster, "beta") as beta,
        chromium.page(origins(cluster)[1], f"#/runs/{JOB.replace('/', '%2F')}") as page,
    ):
        members = page.get_by_role("table", name="Members")
        members.get_by_text("alpha", exact=True).wait_for()
        members.get_by_text("beta", exact=True).wait_for()
        page.locator(".figure", has_text="present, 1 to 2 wanted").get_by_text("2", exact=True).wait_for()
        before = generation(page)
        beta.process.kill()
        members.get_by_text("beta", exact=True).wait_for(state="detached")
        page.get_by_role("table", name="Generations").get_by_text("heartbeat lost").or_(
            page.get_by_role("table", name="Generations").get_by_text("disconnected")
        ).first.wait_for()
        wait_for(lambda: generation(page) > before, "the next generation in the page")
        assert members.get_by_text("alpha", exact=True).count() == 1
        printed = timeline(cluster)
        assert printed
        assert rows(page, "Generations", 0, 1, 2, 7, 3, 4) + rows(page, "Nodes", 0, 1, 5, 4, 2, 3) == printed
        world.kv.delete(f"/raftkv/train/{JOB}/", prefix=True)
        alpha.process.kill()


def timeline(cluster: Cluster) -> list[str]:
    """The rows of both tables of `raftkvctl run timeline`, the newest of each first."""
    with Running(raftkvctl(cluster.endpoints[1], "run", "timeline", JOB)) as program:
        _, generations, nodes = program.wait().output.decode().strip().split("\n\n")
    tables = [[" ".join(line.split()) for line in table.splitlines()[1:]] for table in (generations, nodes)]
    return [row for table in tables for row in reversed(table)]


def rows(page: Page, name: str, *columns: int) -> list[str]:
    """The rows of a table in the page, of some columns."""
    found = page.get_by_role("table", name=name, exact=True).locator("tbody tr").all()
    cells = [row.locator("td").all_inner_texts() for row in found]
    return [" ".join(" ".join(row[column] for column in columns).split()) for row in cells]


def generation(page: Page) -> int:
    return int(page.locator(".figure", has=page.get_by_text("Generation", exact=True)).locator("strong").inner_text())


def test_a_commit_appears_and_an_attempt_goes(chromium: Chromium, cluster: Cluster, world: World) -> None:
    with chromium.page(origins(cluster)[1], f"#/checkpoints/{RUN}") as page:
        page.wait_text("2 of 4 ranks")
        step = world.saving.record.step
        world.prepare(world.saving, range(2, 4), 4 << 20)
        page.wait_text("4 of 4 ranks")
        world.saving.commit()
        committed = page.get_by_role("table", name="Checkpoints", exact=True)
        committed.get_by_role("link", name=str(step), exact=True).wait_for()
        page.wait_text("Nothing is being saved now.")
        assert committed.get_by_text("latest").count() == 1
        world.saving = world.begin(RUN, step + 1000)
        world.prepare(world.saving, range(2), 1 << 20)
        page.wait_text("2 of 4 ranks")


def test_a_lock_is_handed_on(chromium: Chromium, cluster: Cluster, world: World) -> None:
    with chromium.page(origins(cluster)[1], "#/contests?prefix=app/") as page:
        row = page.get_by_role("row", name="app/migration")
        row.get_by_text(f"lease {world.lock[0]:x}").first.wait_for()
        world.revoke(world.lock[0])
        page.wait_for_function(
            "hex => [...document.querySelectorAll('tr')].some(row => "
            "row.cells[0].innerText === 'app/migration' && row.cells[2].innerText === `lease ${hex}`)",
            arg=f"{world.lock[1]:x}",
        )


MANY = 10_000


def test_of_ten_thousand_checkpoints_a_page_is_read(chromium: Chromium, cluster: Cluster, world: World) -> None:
    write_many(world.kv, "many")
    with chromium.page(origins(cluster)[1], "#/checkpoints/many/dcp") as page:
        received: list[int] = []
        page.tab.on("response", lambda response: received.append(int(response.headers.get("content-length", 0))))
        page.reload()
        table = page.get_by_role("table", name="Checkpoints", exact=True)
        table.get_by_role("link", name=str(MANY), exact=True).wait_for()
        assert table.locator("tbody tr").count() == 50
        page.get_by_role("button", name="Older").first.click()
        table.get_by_role("link", name=str(MANY - 50), exact=True).wait_for()
        assert table.locator("tbody tr").count() == 50
        page.wait_text("of 10,000")
        page.get_by_role("button", name="Newest").first.click()
        table.get_by_role("link", name=str(MANY), exact=True).wait_for()
        assert 0 < sum(received) < 600_000


def write_many(kv: raftkv.Client, run: str) -> None:
    keys = RegistryKeys(run)
    for first in range(1, MANY + 1, 100):
        puts = []
        for step in range(first, first + 100):
            number = AttemptId(step, 1, step * RANDOM_DIGITS).number
            record = Checkpoint(
                run, step, 1, number, "dcp", 1, f"memory://{step}", "m", "r", 1, 1 << 20, time=1e9 + step
            )
            puts.append(Put(keys.record("dcp", step), record.encode()))
        kv.txn().then(*puts).commit()
    kv.put(keys.latest("dcp"), Latest(MANY, 1, MANY, MANY << 20, time=1e9 + MANY).encode())


def test_a_run_whose_beginning_was_compacted_says_so(chromium: Chromium) -> None:
    keys = RunKeys("compacted")
    first, second = (Member(f"{host}-1", host) for host in "ab")
    with Cluster(RAFTKV, size=1) as cluster, raftkv.connect(cluster.endpoints[0]) as kv:
        kv.put(keys.round, GenerationRecord(1, (first,), 100.0).encode())
        broken = kv.put(keys.state, State(1, "broken", "lost 1 of 1: a", time=110.0).encode())
        kv.compact(broken.revision)
        kv.put(keys.round, GenerationRecord(2, (second,), 120.0).encode())
        with chromium.page(*origins(cluster), "#/runs/compacted") as page:
            page.allowed = ("400 (Bad Request)",)  # the keys as they were are asked for, and compacted
            page.wait_text(f"begins at revision {broken.revision + 1}; older changes were compacted")
            generations = page.get_by_role("table", name="Generations")
            assert generations.locator("tbody tr").count() == 2
            kv.put(keys.state, State(2, "closed", "succeeded", time=130.0).encode())
            generations.get_by_text("closed: succeeded").wait_for()


def test_nodes_that_came_before_the_first_state_are_there(chromium: Chromium, cluster: Cluster, world: World) -> None:
    keys = RunKeys("early")
    world.kv.put(keys.node("a-1"), Node("a-1", "a").encode())
    world.kv.put(keys.state, State(0, "gathering", time=100.0).encode())
    with chromium.page(origins(cluster)[1], "#/runs/early") as page:
        page.wait_text("gathering; 1 node present, 1 wanted")


def test_the_page_of_a_frozen_member_says_so(chromium: Chromium) -> None:
    """A frozen member ends no stream: pages went on showing the figures of then, or what they had read."""
    with Cluster(RAFTKV, size=1) as cluster, chromium.page(*origins(cluster), "#/keys") as page:
        page.wait_text("No keys yet.")
        page.allow_lost = True
        process = cluster.members[0].process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            page.wait_text("Member m0 does not answer", timeout_s=60.0)
        finally:
            process.send_signal(signal.SIGCONT)
        page.wait_for_function("() => document.getElementById('notice').textContent === ''")


def test_the_page_of_a_killed_member_says_so_and_goes_on_with_every_view(chromium, cluster, world):
    own, *others = origins(cluster)
    with chromium.page(own, f"#/runs/{RUN}", origins=tuple(others)) as page:
        page.wait_text("generation 2: 4 nodes, 32 ranks")
        page.allow_lost = True
        cluster.members[0].kill()
        try:
            page.wait_for_function("() => document.getElementById('notice').textContent.includes('does not answer')")
            page.wait_for_url(lambda url: any(url.startswith(other) for other in others))
            page.wait_text("generation 2: 4 nodes, 32 ranks")
            assert page.locator("#notice").inner_text() == ""
            for place, texts in VIEWS.items():
                page.show(place)
                page.wait_text(texts[0])
        finally:
            cluster.members[0].restart()
