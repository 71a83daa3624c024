"""The graph sizes that engines capture by default, as buckets, to compare with.

Engines key graphs by token count. A graph of n tokens holds any step of at most n query rows, so it is
``Bucket(min(n, max_running), n, 0)``: decodes may take prefill slots. Engines differ in which steps they replay graphs
for (some in decode-only steps alone); here every list serves every step, by the same rule, and a step may take the
cheapest graph that holds it, where engines take the smallest. Both make the lists look better than they are.

The formulas were read in the public repositories in the versions named at each; they change from version to version.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from podgraph.shapes import Bucket
from podgraph.workload.steps import StepHistogram


def engine_lists(token_budget: int, max_running: int) -> dict[str, tuple[Bucket, ...]]:
    """Every list by name, for an engine of those limits; see the functions for their sources."""
    return {
        "vllm": token_graphs(vllm_sizes(), token_budget, max_running),
        "sglang": token_graphs(sglang_sizes(token_budget), token_budget, max_running),
        "tensorrt_llm": token_graphs(tensorrt_llm_sizes(), token_budget, max_running),
        "megatron": megatron_buckets(token_budget, max_running),
        "pow2": token_graphs(pow2_sizes(token_budget), token_budget, max_running),
    }


def token_graphs(sizes: Iterable[int], token_budget: int, max_running: int) -> tuple[Bucket, ...]:
    """A bucket for each token count up to the budget, ascending."""
    return tuple(Bucket(min(n, max_running), n, 0) for n in sorted(set(sizes)) if n <= token_budget)


def vllm_sizes(max_capture_size: int = 512) -> list[int]:
    """vLLM: 1, 2, 4, multiples of 8 below 256, multiples of 16 from there to the largest: 51 sizes up to 512.

    ``cudagraph_capture_sizes`` where it is not given; the largest is ``min(2 * max_num_seqs, 512)`` unless given, which
    is 512 from 256 sequences on. Same formula from 0.11 to 0.31 (1,024 on data-center Blackwell in later ones).
    https://github.com/vllm-project/vllm, ``vllm/config/vllm.py``, ``_set_cudagraph_sizes``.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_capture_size + 1, 16)]
    return [n for n in sizes if n <= max_capture_size]


def sglang_sizes(max_tokens: int, max_batch: int = 256) -> list[int]:
    """SGLang: the sizes of its decode graphs and those of its piecewise prefill graphs together.

    Decode graphs go up to ``cuda_graph_max_bs``, 256 on an H200 with the default tensor parallelism; prefill graphs up
    to ``piecewise_cuda_graph_max_tokens``, here the token budget. Both lists serve every step here.
    https://github.com/sgl-project/sglang, ``python/sglang/srt/server_args.py``,
    ``_generate_cuda_graph_batch_sizes`` and ``_generate_piecewise_cuda_graph_tokens``, early 2026; an earlier version
    has steps of 128 from 640 to 4,096 tokens.
    """
    decode = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, max_batch + 1, 32)]
    prefill = [
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, max_tokens + 1, 512),
    ]
    return sorted({*(n for n in decode if n <= max_batch), *(n for n in prefill if n <= max_tokens)})


def tensorrt_llm_sizes(max_batch: int = 128) -> list[int]:
    """TensorRT-LLM: 1, 2, 4, multiples of 8 up to 128, powers of two from 256 below the largest, and the largest.

    ``CudaGraphConfig`` with padding; the largest is 128 unless ``max_batch_size`` is given. It replays graphs in steps
    without prefill only. https://github.com/NVIDIA/TensorRT-LLM, ``tensorrt_llm/llmapi/llm_args.py``,
    ``_generate_cuda_graph_batch_sizes``, 1.0 to 1.2; later ones go on in steps of 64 beyond 128.
    """
    sizes = [*(1, 2, 4), *range(8, 129, 8)]
    power = 256
    while power < max_batch:
        sizes.append(power)
        power *= 2
    return sorted({*(n for n in sizes if n <= max_batch), max_batch})


def megatron_buckets(token_budget: int, max_running: int, rounder: int = 8) -> tuple[Bucket, ...]:
    """Megatron style: token counts halved from the budget down, each as a mixed graph and as a decode-only one.

    Counts are rounded up to a multiple of ``rounder``. Megatron's graphs also fix how many requests prefill (its mixed
    graphs 16 by default); here a mixed one holds any composition of its tokens, which serves more steps.
    https://github.com/NVIDIA/Megatron-LM, ``megatron/core/inference/batch_dimensions_utils.py``,
    ``CUDAGraphBatchDimensionBuilder``: the exponential distribution of early 2026, of which only descriptions could be
    read; the linear one before it was read in the source.
    """
    buckets = set()
    for most, decode_only in ((token_budget, False), (min(token_budget, max_running), True)):
        size = most
        while True:
            tokens = min(most, -(-size // rounder) * rounder)
            buckets.add(Bucket(tokens, 0, tokens) if decode_only else Bucket(min(tokens, max_running), tokens, 0))
            if size <= rounder:
                break
            size //= 2
    return tuple(sorted(buckets, key=lambda b: (b.prefill_len + b.decode_count, b)))


def pow2_sizes(token_budget: int) -> list[int]:
    """1, 2, 4... below the budget, and the budget."""
    return [*(1 << n for n in range(token_budget.bit_length()) if 1 << n < token_budget), token_budget]


def pow2_grids(steps: StepHistogram, max_buckets: int) -> list[tuple[Bucket, ...]]:
    """Every grid of powers of two over prefill slots, prefill rows and decodes that has at most so many buckets.

    An axis holds the workload's largest value, rounded up to a power of two, and as many halves of it as the grid has
    room for; prefill rows and decodes hold 0 too. To be compared by the best of them.
    """
    most = [int(values.max(initial=0)) for values in (steps.prefill_requests, steps.prefill_len, steps.decode_count)]
    slots, lengths, decodes = (
        [1 << n for n in range((most_of - 1).bit_length(), -1, -1)] for most_of in map(_one, most)
    )
    grids = {}
    for a, b, c in itertools.product(range(1, len(slots) + 1), range(1, len(lengths) + 1), range(1, len(decodes) + 1)):
        grid = {
            Bucket(s + d if p else d, p, d)
            for s, p, d in itertools.product(slots[:a], [*lengths[:b], 0], [*decodes[:c], 0])
            if p or d
        }
        if len(grid) <= max_buckets:
            # nothing is gained by a grid that fits into a larger one of the list
            grids[a, b, c] = tuple(sorted(grid))
    return [
        grid
        for (a, b, c), grid in grids.items()
        if not any(larger in grids for larger in ((a + 1, b, c), (a, b + 1, c), (a, b, c + 1)))
    ]


def _one(value: int) -> int:
    return max(1, value)
