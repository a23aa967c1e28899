"""What can go wrong with GPUs: none, not these, too little memory, what they do not do."""

# ruff: noqa: E501  # texts of tables

from __future__ import annotations

from tests.docs.messages import BY_THE_MACHINE, ON_A_GPU, NotTried, Row
from tests.docs.provoke import baton

ON_GPUS = [
    Row(
        {
            "--device cuda: <reason>": baton("serve", "--port", "0", "--device", "cuda"),
            "--gpu <number>: <reason>": baton("serve", "--port", "0", "--gpu", "1"),
            "running on the CPU: <reason>": NotTried("it needs a driver for GPUs, and no GPU that torch can use"),
        },
        "No GPU, or not this one, can be used. The reason is one of: no driver (`nvidia-smi` must work); a torch "
        "without CUDA (pip took a CPU build); `CUDA_VISIBLE_DEVICES` hides them; a driver too old for this torch.",
        "Mend what the reason names, or run with `--device cpu`. `baton doctor` looks at all of it.",
    ),
    Row(
        {
            "--gpu <number> does not go with --device cpu": baton("serve", "--gpu", "0", "--device", "cpu"),
            "<option> is set, but the nodes run on the CPU: <reason>": baton(
                "serve", "--prefill-gpus", "0", "--device", "cpu"
            ),
            "--gpu <number> does not go with <option>: one of them says where": baton(
                "serve", "--gpu", "1", "--prefill-gpus", "0"
            ),
        },
        "Two options contradict each other.",
        "Leave one of them out.",
    ),
    Row(
        {
            "<option> <text> is no list of GPU numbers like 0,1": baton("serve", "--prefill-gpus", "one"),
            "GPU <number> is not there: torch sees <number>, numbered from 0 (CUDA_VISIBLE_DEVICES, where it is "
            "set, says which)": NotTried("it needs a GPU; tests/ops/test_cli.py tries it with a number of them"),
            "<number> GPUs are named for <number> node<s> (<list>): a node runs on one; more nodes are --prefill N, "
            "--decode N": NotTried("it needs a GPU; tests/ops/test_gpu_plan.py tries it with a number of them"),
        },
        "`--prefill-gpus` and `--decode-gpus` list the GPUs that nodes take in turn.",
        "Numbers go from 0, as `nvidia-smi -L` lists them, where nothing is hidden.",
    ),
    Row(
        {
            "<number> nodes on GPU <number> have <part> of its memory each, but a node needs <part>: start fewer, or "
            "raise --gpu-memory-fraction": NotTried("it needs a GPU; tests/ops/test_gpu_plan.py tries it"),
            "a KV pool of <pages> pages does not fit on the GPU: weights <size>, steps <size> and pool <size> GiB need "
            "<size> GiB; this node may take <size> of <size> GiB (--gpu-memory-fraction <part>, <size> GiB free). Raise "
            "the fraction, free memory, or lower --kv-pages, --prefill-budget or --max-running": NotTried(
                "it needs a GPU; tests/engine/test_sizing.py tries the sums"
            ),
            "the GPU's memory is too small while the model is loaded (<reason>): lower --gpu-memory-fraction, "
            "--prefill-budget or --max-running": BY_THE_MACHINE,
        },
        "Weights, the largest step and a KV pool have to fit into a node's part of the GPU; two nodes on one GPU "
        "have half of it each, and the weights twice.",
        "End what else uses the GPU (`nvidia-smi`), start fewer nodes on it, take `--colocated` (the weights once), a "
        "smaller model, or lower what the message names.",
    ),
    Row(
        {
            "<device> has <size> MiB free of the <size> that this node is to have: waiting for <time> s at the "
            "most": NotTried("it needs a GPU that others use"),
            "<device>: going on with <size> MiB; others hold the rest": NotTried("it needs a GPU that others use"),
        },
        "Another process holds memory of this GPU; one that was just killed gives it back within seconds.",
        "Wait; if it goes on with less, look with `nvidia-smi` who holds it. A small pool means fewer requests at once.",
    ),
    Row(
        {
            "--transfer cuda-ipc is for nodes on GPUs; on the CPU take auto, shm or frames": baton(
                "serve", "--port", "0", "--transfer", "cuda-ipc"
            ),
            "--transfer shm is for nodes on the CPU; on GPUs take auto, cuda-ipc or frames": NotTried(
                "it needs a GPU; tests/ops/test_cli.py tries it with a number of them"
            ),
            "--transfer <plane> does not work with --device <device>: use auto, <planes>": NotTried(
                "the command line says it before, in other words"
            ),
            "--attention <name>: it needs a GPU": baton("serve", "--port", "0", "--attention", "triton"),
            "--cuda-graphs on needs a GPU, and no --attention sdpa": baton("serve", "--port", "0", "--cuda-graphs", "on"),
        },
        "The option asks for what this device does not do.",
        "Leave it out: `auto` takes the fastest that works, and the log says which.",
    ),
    Row(
        {
            "--attention flashinfer: <reason>": NotTried("it needs a GPU without flashinfer"),
            "long prompts are slower than they could be, without flashinfer: <reason>": NotTried(
                "it needs a GPU without flashinfer"
            ),
        },
        "Long prompts are computed fastest by flashinfer. It is not installed, or lacks nvcc to build its kernels, or "
        "has none for this model's heads.",
        'Do what the reason says: `pip install -e ".[cuda]"`, or install NVIDIA\'s CUDA toolkit. Without it all works, '
        "prompts above some 1,000 tokens more slowly.",
    ),
    Row(
        {
            "attention is sdpa, the slow reference, without CUDA graphs: the model is in float32": NotTried(
                "it needs a GPU"
            ),
            "--attention flashinfer computes in bfloat16 and float16, not in float32": ON_A_GPU,
            "--attention triton has no room for heads of <size> in float32": ON_A_GPU,
            "--cuda-graphs on needs attention other than sdpa, which float32 has: take --dtype bfloat16 or "
            "--attention triton": ON_A_GPU,
        },
        "The fast path on GPUs is for bfloat16 and float16.",
        "Add `--dtype bfloat16`. float32 is for comparing numbers.",
    ),
    Row(
        {
            "a KV page of <size> bytes a layer is no multiple of <size>: choose an even --page-size": NotTried(
                "it needs a GPU"
            )
        },
        "Kernels copy pages in whole units.",
        "Take the default, 16.",
    ),
    Row(
        {"the KV pool cannot be offered to other processes: <reason>": NotTried("it needs a GPU without CUDA IPC")},
        "CUDA IPC does not work here (some containers and virtual machines), so KV pages take the slow way, `frames`.",
        "Run containers with `--ipc=host` and the same user; or put both nodes on one GPU with `--colocated`.",
    ),
]  # fmt: skip
