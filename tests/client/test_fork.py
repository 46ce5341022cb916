"""Forked children of a process with a client: each has its own connections; locks and leases stay with the parent."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.procs import RAFTKV, Cluster, wait_for

OF_FORKS = ("-W", "ignore:This process:DeprecationWarning")
"""From Python 3.12 on every fork of a process with threads is warned of, and a client has a thread."""

PRELUDE = """
import os, sys, threading, traceback
import raftkv

def in_child(function):
    '''Fork, run a function in the child, and give its exit status: 0 if it did not raise.'''
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        function()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

def message(function):
    '''What using it raises.'''
    try:
        function()
    except raftkv.Forked as error:
        return str(error)
    raise SystemExit('nothing was raised')

def sockets():
    '''Inodes of the sockets of this process.'''
    names = []
    for number in os.listdir('/proc/self/fd'):
        try:
            names.append(os.readlink(f'/proc/self/fd/{number}'))
        except OSError:
            pass
    return {name for name in names if name.startswith('socket:')}

kv = raftkv.connect(sys.argv[1].split(','), namespace='fork/')
"""


def run(cluster, program, *, timeout_s=120):
    """Run a program after the prelude and return its output."""
    text = PRELUDE + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-X", "dev", *OF_FORKS, "-c", text, ",".join(cluster.endpoints)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    errors = "\n".join(line for line in done.stderr.split("\n") if not line.startswith("Executing <"))  # slow machine
    assert (done.returncode, errors) == (0, ""), done.stdout
    return done.stdout


def test_child_uses_client_and_parent_connection_survives(member):
    program = """
        kv.put('a', 'parent')
        before = sockets()

        def child():
            assert not sockets() & before, 'sockets of the parent are open in the child'
            assert kv.get('a').text == 'parent'
            kv.put('b', 'child')

        with kv.watch('b') as watch:
            before = sockets()
            print(in_child(child))
            print(watch.get(timeout_s=30).value)
            print(kv.get('b').text, sockets() == before)
        kv.close()
    """
    assert run(member, program) == "0\nb'child'\nchild True\n"


@pytest.mark.long
def test_a_client_that_was_closed_is_closed_in_the_child_too(member):
    program = """
        kv.put('a', '1')
        kv.close()

        def child():
            try:
                kv.get('a')
            except raftkv.Closed:
                return
            raise SystemExit(1)

        print(in_child(child))
    """
    assert run(member, program) == "0\n"


@pytest.mark.long
def test_a_child_that_closes_or_exits_leaves_the_parents_client_alone(member):
    program = """
        kv.put('a', '1')
        watch = kv.watch('a')
        print(in_child(kv.close))
        child = os.fork()
        if child == 0:
            kv.get('a')
            sys.exit(0)  # by way of atexit
        print(os.waitpid(child, 0)[1])
        kv.put('a', '2')
        print(watch.get(timeout_s=30).value)
        kv.close()
    """
    assert run(member, program) == "0\n0\nb'2'\n"


@pytest.mark.long
def test_objects_held_by_the_parent_are_unusable_in_the_child_and_stay_held(member):
    program = """
        told = []
        with kv.lease(10) as lease, kv.lock('l') as lock, kv.campaign('e', 'me') as term, kv.session(10) as session:
            watch = kv.watch('a')
            observed = kv.observe('e')
            txn = kv.txn()
            kv.put('a', '1', lease=lease)
            child = os.fork()
            if child == 0:
                uses = {
                    'lease': lambda: lease.check(),
                    'put with lease': lambda: kv.put('b', '1', lease=lease),
                    'put with session': lambda: kv.put('b', '1', lease=session),
                    'put with fence': lambda: kv.put('b', '1', fence=lock),
                    'lease.revoke': lambda: lease.revoke(),
                    'lock.held': lambda: lock.held,
                    'lock.release': lambda: lock.release(),
                    'term.proclaim': lambda: term.proclaim('x'),
                    'session.keep': lambda: session.keep('k', 'v'),
                    'watch': lambda: next(watch),
                    'observe': lambda: next(observed),
                    'txn': lambda: txn.commit(),
                }
                told = {name: message(use) for name, use in uses.items()}
                assert len(set(told.values())) == 1, told
                text = told['lease']
                assert f'belongs to process {os.getppid()}' in text and f'forked child {os.getpid()}' in text, text
                watch.cancel()
                kv.put('from child', '1')
            else:
                assert os.waitpid(child, 0)[1] == 0
                assert lease.alive and lock.held and term.leads and session.alive
                kv.put('x', '1', lease=lease, fence=lock)
                kv.put('x', '2', lease=session, fence=term)
                print(kv.get('from child').text)
        # The child comes here too: it has left the blocks, and given nothing back.
        if child == 0:
            os._exit(0 if kv.count('', prefix=True) else 1)
        print(kv.count('l', prefix=True) + kv.count('e', prefix=True))
        kv.close()
    """
    assert run(member, program) == "1\n0\n"


@pytest.mark.long
def test_child_does_not_renew_leases_of_killed_parent(tmp_path):
    flags = RAFTKV.with_flags("--lease-min-ttl", "1")
    with Cluster(flags) as cluster:
        program = """
            import signal
            holder = os.fork()
            if holder == 0:
                lease = kv.lease(1).grant()
                kv.put('held', '1', lease=lease)
                orphan = os.fork()
                if orphan == 0:
                    kv.get('held')
                    threading.Event().wait()
                kv.put('orphan', str(orphan))
                threading.Event().wait()
            with kv.watch('', prefix=True, start_revision=1) as watch:
                events = {}
                while b'orphan' not in events:
                    event = watch.get(timeout_s=30)
                    events[event.key] = event.value
                os.kill(holder, signal.SIGKILL)
                while (event := watch.get(timeout_s=30)).type != 'DELETE':
                    pass
                print(event.key)
            os.kill(int(events[b'orphan']), signal.SIGKILL)
            os.waitpid(holder, 0)
            kv.close()
        """
        assert run(cluster, program) == "b'held'\n"


@pytest.mark.long
def test_forks_in_the_middle_of_the_calls_of_many_threads(member):
    program = """
        stop = threading.Event()

        def hammer(number):
            while not stop.is_set():
                kv.put(f'{number}', 'x')

        threads = [threading.Thread(target=hammer, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        statuses = {in_child(lambda: kv.put('child', str(turn))) for turn in range(30)}
        stop.set()
        for thread in threads:
            thread.join()
        print(statuses, kv.get('child').text)
        kv.close()
    """
    assert run(member, program) == "{0} 29\n"


@pytest.mark.long
def test_the_loop_imports_nothing_that_a_fork_could_fall_into(member):
    """The import lock of a module that the loop's thread was importing would stay held in the child."""
    program = """
        before = set(sys.modules)
        watch, lease = kv.watch('a'), kv.lease(10).grant()
        with kv.lock('l'), kv.campaign('e'), kv.session():
            kv.put('a', '1', lease=lease)
            next(watch), next(kv.observe('e')), kv.status(), kv.stm(lambda tx: tx.get('a'))
        elsewhere = raftkv.connect('localhost:1', timeout_s=0.1)
        try:
            elsewhere.get('a')
        except raftkv.EndpointsFailed:
            print(sorted(set(sys.modules) - before))
        kv.close()
    """
    assert run(member, program) == "[]\n"


@pytest.mark.long
def test_a_grandchild_and_a_view(member):
    program = """
        view = kv.view('view/')
        view.put('a', '1')

        def child():
            view.put('b', '1')
            assert in_child(lambda: view.put('c', '1')) == 0
            assert view.count('', prefix=True) == 3

        print(in_child(child), view.count('', prefix=True))
        kv.close()
    """
    assert run(member, program) == "0 3\n"


@pytest.mark.long
def test_workers_of_multiprocessing(member):
    program = """
        import multiprocessing

        kv.put_many({str(number): str(number * number) for number in range(100)})

        def square(number):
            return int(kv.get(str(number)).text)

        with multiprocessing.get_context('fork').Pool(4) as pool:
            print(sum(pool.map(square, range(100))))
        print(kv.get('9').text)
        kv.close()
    """
    assert run(member, program) == f"{sum(number * number for number in range(100))}\n81\n"


LOADER = """
    import warnings
    warnings.simplefilter('ignore')  # of torch: about the number of cores
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Stored(Dataset):
        '''Samples whose values are in the store; every worker reads through the client that it inherited.'''

        def __len__(self):
            return 64

        def __getitem__(self, index):
            kv.put(f'seen/{index}', str(os.getpid()), lease=None)
            return torch.tensor(int(kv.get(f'sample/{index}').text))

    kv.put_many({f'sample/{index}': str(index) for index in range(64)})
    with kv.lock('training') as lock:
        for generation in range(2):
            loader = DataLoader(Stored(), batch_size=8, num_workers=3, multiprocessing_context='fork')
            print(sum(int(batch.sum()) for batch in loader))
        kv.put('done', 'yes', fence=lock)
    workers = {item.text for item in kv.range('seen/', prefix=True)}
    print(len(workers), str(os.getpid()) in workers)
    kv.close()
"""


@pytest.mark.long
def test_workers_of_a_torch_data_loader(member):
    total = sum(range(64))
    assert run(member, LOADER) == f"{total}\n{total}\n3 False\n"


@pytest.mark.long
def test_forked_clients_survive_member_deaths(three):
    """The parent's watch sees every write of every child, also when its member dies in between."""
    program = """
        watch = kv.watch('w/', prefix=True)

        def put(key):
            while True:
                try:
                    return kv.txn().when(kv.version(key) == 0).then(raftkv.put(key)).commit()
                except raftkv.StatusError:
                    continue  # the leader was lost: it may have happened, and is not done twice

        for turn in range(6):
            assert in_child(lambda: put(f'w/{turn}')) == 0
            if turn == 2:
                print('kill', flush=True)
                sys.stdin.readline()
        print([event.key.decode()[2:] for event in watch.events(timeout_s=3)])
        kv.close()
    """
    process = subprocess.Popen(
        [sys.executable, *OF_FORKS, "-c", PRELUDE + textwrap.dedent(program), ",".join(three.endpoints)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "kill\n"
        three.members[0].kill()
        process.stdin.write("killed\n")
        process.stdin.flush()
        assert process.stdout.readline() == "['0', '1', '2', '3', '4', '5']\n"
        wait_for(lambda: process.poll() == 0, "the program to end")


@pytest.mark.long
def test_a_process_pool_executor(member):
    program = """
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        def add(number):
            return kv.put(str(number), 'x').revision

        kv.put('first', 'connected')
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context('fork')) as pool:
            print(len(set(pool.map(add, range(20)))))
        kv.close()
    """
    assert run(member, program) == "20\n"
