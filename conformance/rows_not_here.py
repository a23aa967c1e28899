"""Rows that do not apply, each with its reason."""

from __future__ import annotations

from conformance.rows import not_applicable

not_applicable("there is no prefix cache", "A14", "B6", "B9", "H4", "H5", "H8")
not_applicable("there is no tensor parallelism", "B11", "F9", "G1", "G2", "G3", "G6")
not_applicable("there is no speculative decoding", "B5")
not_applicable("KV is never copied to the host to make room: it is computed again", "A9")
not_applicable("there is no store of full objects; what was sent stays at P until it is committed", "F4")
not_applicable("there is no RDMA, and memory is registered with nobody", "I10")
