"""Greetings of processes that fit together, or not."""

from __future__ import annotations

from dataclasses import replace

from common.host import this_process
from common.kv.layout import KVLayout
from common.messages import Hello, HostIdentity, Role

LAYOUT = KVLayout(layers=2, page_size=4, kv_heads=1, head_dim=8, dtype="float32")


def hello(role: Role, *, layout: KVLayout = LAYOUT) -> Hello:
    """A node's greeting. It is on a host of its own, so that nobody looks at its process."""
    return Hello(
        node_id=f"{role.value}-0",
        role=role,
        host=HostIdentity(f"the host of {role.value}", 1, 1, 1),
        model="model-a",
        layout=layout,
        planes=("frames",),
        capacity_tokens=4096,
        prefill_budget_tokens=128,
    )


DECODE = hello(Role.DECODE)
PREFILL = hello(Role.PREFILL)


def here(greeting: Hello) -> Hello:
    """The same as a process of this host: the running one."""
    return replace(greeting, host=this_process())
