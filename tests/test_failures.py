"""What is left of a run that fails: processes, streams, and the message."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, compose_config
from test_command_line import is_running

import settings
import train
from checkpoint import run_folder
from parallel.failures import CollectiveFailure, RankFailure, report_error
from training.optimizer import LossScale
from training.preparation import PreparedRun
from utils import World

# ---- Messages -------------------------------------------------------------------------------------------------------


def too_small_a_scale():
    scale = LossScale(True)
    while True:
        scale.lower()


def full_disk():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/tokens")


def last_checkpoint_is_lost():
    raise OSError("The run's last checkpoint could not be written")


def a_rank_is_killed():
    raise RankFailure("rank 1 of 2 failed: its process was ended by SIGKILL", is_explained=True)


def a_rank_has_gone():
    raise CollectiveFailure("A collective operation failed; it was waiting for rank 1")


def division():
    return 1 / 0


def missing_file():
    open("/no/such")


def raised_by(function) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError


EXPLAINED = (too_small_a_scale, full_disk, last_checkpoint_is_lost, a_rank_is_killed, a_rank_has_gone)


@pytest.mark.parametrize("function", [*EXPLAINED, division, missing_file], ids=lambda function: function.__name__)
def test_a_message_that_says_all_comes_without_a_traceback(function, capsys):
    error = raised_by(function)
    explained = function in EXPLAINED
    assert train.report_error(error) == 1
    written = capsys.readouterr().err
    assert str(error) in written and ("Traceback" in written) == (not explained)
    assert report_error(1, error).is_explained == explained, "in a rank as well"
    train._reported.clear()
    train.report_error(error, wants_traceback=True)
    assert function.__name__ in capsys.readouterr().err
    train._reported.clear()


def test_the_folder_is_printed_at_the_start(tmp_path, capsys):
    config = settings.finalize(compose_config("model=tiny", f"local_dirs=[{tmp_path}]", "wandb.enabled=false"))
    run_dir = run_folder.make(config)
    run = PreparedRun(config, run_dir, World())
    run.checkpointer.close()
    run.heartbeat.close()
    assert f"run folder: {run_dir}\n" in capsys.readouterr().out


# ---- Streams --------------------------------------------------------------------------------------------------------

STREAMS = """
import os, sys
sys.path.insert(0, {root!r})
from report import streams
streams.open_standard_streams()
with open("data", "w") as file:
    print("to stdout", flush=True)
    os.write(1, b"to 1")
    os.write(2, b"to 2")
    print("to stderr", file=sys.stderr, flush=True)
print("buffered")
streams.flush_streams()
sys.exit(3)
"""


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_end_no_run_and_write_into_no_file(tmp_path, redirection):
    (tmp_path / "script.py").write_text(STREAMS.format(root=str(ROOT)))
    shell = f"set -o pipefail; {sys.executable} script.py {redirection}"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "data").read_text() == "" and "Exception" not in done.stderr


def test_a_closed_pipe_leaves_the_exit_code(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from report import streams; print('x'); sys.stdin.read()"
    code += "; streams.flush_streams(); sys.exit(3)"
    # Buffered, as it is where nobody asked for something else: print() then leaves the failing to the end.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    words = [sys.executable, "-c", code]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=buffered)
    process.stdout.close()
    process.stdin.close()
    assert process.wait(20) == 3


# ---- Processes ------------------------------------------------------------------------------------------------------

WORKERS = """
import os, sys, time
sys.path.insert(0, {root!r})
from data.workers import ordered_map

def wait(_, item):
    os.write(1, b"pid %d\\n" % os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    list(ordered_map(wait, range(8), 2, serial_items=0))
"""


def test_workers_end_with_a_process_that_is_killed(tmp_path):
    (tmp_path / "parent.py").write_text(WORKERS.format(root=str(ROOT)))
    parent = subprocess.Popen([sys.executable, "parent.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    pids = [int(parent.stdout.readline().split()[1]) for _ in range(2)]
    parent.send_signal(signal.SIGKILL)
    parent.wait(timeout=20)
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in pids if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    parent.stdout.close()
    assert not left
