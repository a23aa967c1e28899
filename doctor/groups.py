"""All checks, in the order in which they run. A new one is a row in the `CHECKS` of its file."""

from __future__ import annotations

from doctor import cluster, gpus, kernels, machine, model, network, planes, processes, room, software
from doctor.asked import Check, Group

GROUPS = (
    Group("software", software.CHECKS),
    Group("machine", machine.CHECKS),
    Group("processes", processes.CHECKS),
    Group("network", network.CHECKS),
    Group("GPUs", (*gpus.CHECKS, *kernels.CHECKS)),
    Group("model", (*model.CHECKS, *room.CHECKS)),
    Group("data planes", planes.CHECKS),
    Group("cluster", cluster.CHECKS),
)
CHECKS: dict[str, Check] = {check.name: check for group in GROUPS for check in group.checks}
