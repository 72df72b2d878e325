"""Where the processes of a run meet to form a group: an init_method of torch.distributed."""

import os
import re
import shutil
import tempfile


class Rendezvous:
    """Where the ranks of one node meet: gives the init_method of torch.distributed.

    A file in memory that has no name in any folder, reached through this process's entry in /proc: nobody else can take
    it, as a port can be taken, and nothing is left on the disk however this process ends. Not on Linux: a
    file in a private folder. With `port`: that TCP port.
    """

    def __init__(self, port: int | None):
        self.port = port
        self.descriptor: int | None = None
        self.folder: str | None = None

    def __enter__(self) -> str:
        if self.port is not None:
            return f"tcp://127.0.0.1:{self.port}"
        if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
            self.descriptor = os.memfd_create("rendezvous")
            return f"file:///proc/{os.getpid()}/fd/{self.descriptor}"
        self.folder = tempfile.mkdtemp(prefix="rendezvous-")
        return f"file://{self.folder}/store"

    def __exit__(self, *_):
        if self.descriptor is not None:
            os.close(self.descriptor)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def srun_address() -> str:
    """tcp://MASTER_ADDR:MASTER_PORT, by default the first node of the step and a port drawn from the job's number."""
    env = os.environ
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or "127.0.0.1"
    first = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)  # of gpu[01-04,07],other
    address = env.get("MASTER_ADDR") or (first.group(1) + (first.group(2) or "") if first else nodes)
    job = re.sub(r"\D", "", env.get("SLURM_JOB_ID", "")) or "0"
    return f"tcp://{address}:{env.get('MASTER_PORT') or 20000 + int(job) % 20000}"
