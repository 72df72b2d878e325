"""A map over worker processes, for Python work too slow for one process.

By hand, because the ones of the standard library read all of their input ahead (`Pool.imap`, and `Executor.map` before
Python 3.14), so that memory would grow with the data, and because `Pool` waits for ever for a worker that was killed.
"""

import multiprocessing
import os
import pickle
import signal
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice

from utils import die_with_parent

SERIAL_ITEMS = 16  # done in this process first: starting workers costs seconds, which small inputs never win back

_job: tuple = ()  # in a worker: (function, shared)


def worker_count(setting: int | None) -> int:
    """How many processes `data.num_workers` means: null is one a core that this process may use."""
    if setting is not None:
        return max(int(setting), 1)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ordered_map(function, items, workers: int, shared=None, serial_items: int = SERIAL_ITEMS):
    """Yields function(shared, item) for every item, in order, with no more than a few items in flight.

    function: at a module's top level. shared: sent to each worker once. Where workers cannot be started, or the work
    cannot be sent to them, this process does it.
    """
    items = iter(items)
    for item in items if workers <= 1 else islice(items, serial_items):
        yield function(shared, item)
    first = list(islice(items, 1))
    if not first:
        return
    items = chain(first, items)
    try:
        job = pickle.dumps((function, shared))
    except Exception:  # whatever an object that cannot be pickled raises
        yield from (function(shared, item) for item in items)
        return
    in_flight: deque = deque()  # (item, its future); the item stays until its result is here
    # Spawned rather than forked: this process has threads (the tokenizer's, torch's), over which a fork can deadlock.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (job, os.getpid()))
    try:
        for item in items:
            in_flight.append((item, _submit(pool, item)))
            if len(in_flight) > 2 * workers:
                yield _result(function, shared, *in_flight.popleft())
        while in_flight:
            yield _result(function, shared, *in_flight.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def _start(job: bytes, parent: int):
    global _job
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process as well, and its parent acts on it
    _job = pickle.loads(job)


def _work(item):
    function, shared = _job
    return function(shared, item)


def _submit(pool, item):
    try:
        return pool.submit(_work, item)
    except (BrokenProcessPool, RuntimeError, OSError):
        return None


def _result(function, shared, item, future):
    if future is not None:
        try:
            return future.result()
        except BrokenProcessPool:
            pass  # a worker could not start, or was killed (for lack of memory): its share is done here, one at a time
    return function(shared, item)
