"""Private interfaces of torch that only tests use: there is no public way to ask FSDP2 what it was given, nor to be one
rank of many without the others. Checked with torch 2.13. (What the application uses is in private_apis.py.)
"""

import contextlib
from dataclasses import dataclass
from unittest.mock import patch

import torch


@dataclass(frozen=True)
class FsdpOptions:
    """What `fully_shard` was called with for a block, and how many blocks it gathers ahead of its turn."""

    reshards: bool
    offload_policy: object
    mp_policy: object
    prefetched: int


def fsdp_options(block: torch.nn.Module) -> FsdpOptions:
    state = block._get_fsdp_state()
    group = state._fsdp_param_group
    return FsdpOptions(
        group.post_forward_mesh_info is not None,
        group.offload_policy,
        group.mp_policy,
        len(state._states_to_forward_prefetch),
    )


@contextlib.contextmanager
def early_gathers():
    """A list of the modules whose parameters FSDP2 gathers ahead of their turn, by name, while the context lasts."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    names, original = [], FSDPParamGroup._prefetch_unshard

    def watched(group, pass_type):
        if not group.is_unsharded:
            names.append(group._module_fqn)
        original(group, pass_type)

    with patch.object(FSDPParamGroup, "_prefetch_unshard", staticmethod(watched)):
        yield names


def join_simulated_group(size: int) -> None:
    """Become rank 0 of a process group whose other ranks do not exist; collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
