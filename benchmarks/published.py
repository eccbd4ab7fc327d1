"""Published figures of Shift Parallelism and Arctic Ulysses (section 2 of the paper notes), as data.

What each table is, where it is from and how far to trust it is in ``docs/results.md``.
"""

from __future__ import annotations

# 2.3: Llama-70B FP8, 8 H200, 4,096 in / 250 out. TTFT and TPOT at low load (ms), combined throughput at high load
# (tok/s). The notes leave SP's TTFT and throughput open ("about Shift's").
LATENCY_AND_THROUGHPUT: dict[str, tuple[float | None, float, float | None]] = {
    "DP": (614, 22.5, 45_900),
    "TP": (159, 9.34, 24_700),
    "SP": (None, 32.5, None),
    "Shift": (102, 10.1, 37_200),
}

# 2.4: bursty synthetic, same model, machine and lengths. Median TTFT and TPOT (ms), peak throughput (tok/s).
BURSTY: dict[str, tuple[float, float, float]] = {
    "DP": (1355, 83, 75_535),
    "TP": (3930, 85, 51_162),
    "Shift": (148, 51, 69_147),
}

# 2.5: minutes to play 15 minutes of a trace, 8 H200.
AZURE_MINUTES: dict[str, float] = {"DP": 15, "TP": 15, "SP": 15, "Shift": 15}  # Llama-70B FP8
MOONCAKE_MINUTES: dict[str, float] = {"DP": 150, "TP": 60, "SP": 15, "Shift": 15}  # Qwen3-32B FP8, FP8 KV cache

# 2.6: vLLM in the radar of the production mix: combined tok/s, tok/s generated and tok/s of prefill of one request.
# The model and the lengths are those of 2.3, as the values show. Read off pixels; middles of ranges.
RADAR: dict[str, tuple[float, float, float]] = {"TP": (23_100, 101, 23_000), "DP": (44_000, 46, 7_150)}

# 2.7: Llama-3.1-70B FP8, 8 H100, by input length: TTFT (ms) of a request alone, combined throughput (tok/s).
# 4x(TP=2), TP=8, (SP=4, TP=2) without shift.
ULYSSES_TTFT: dict[int, tuple[float, float, float]] = {
    2048: (220, 107, 90),
    8192: (852, 366, 289),
    32768: (4_390, 1_650, 1_390),
    65536: (11_700, 3_900, 3_290),
    131072: (33_300, 10_040, 9_070),
}
ULYSSES_THROUGHPUT: dict[int, tuple[float, float, float]] = {
    2048: (35_700, 21_400, 30_200),
    8192: (32_900, 21_400, 29_100),
    32768: (24_000, 18_000, 21_900),
    65536: (15_600, 14_600, 16_200),
    131072: (9_400, 10_600, 10_300),
}

# 2.9 (issue #184): Llama-3.1-70B FP8, 4 H200, 79 requests at a time. (out, in) -> mean seconds a request:
# TP=4, then SP=4 with shift at a threshold of 64, 128, 256, 512.
ISSUE_184: dict[tuple[int, int], tuple[float, float, float, float, float]] = {
    (200, 200): (3.83, 7.45, 3.93, 3.86, 3.85),
    (200, 500): (3.98, 7.60, 3.97, 3.98, 3.98),
    (200, 1000): (4.22, 7.85, 4.27, 4.23, 4.23),
    (200, 2000): (4.60, 10.53, 6.50, 6.22, 6.38),
    (5000, 500): (120.1, 201.9, 150.3, 147.3, 148.6),
    (5000, 1000): (124.3, 205.3, 167.7, 165.4, 165.6),
    (5000, 2000): (132.7, 218.0, 204.5, 203.8, 204.3),
    (5000, 5000): (160.0, 323.2, 323.7, 324.2, 324.2),
    (5000, 8000): (190.0, 438.9, 441.5, 440.1, 440.6),
    (8000, 200): (207.9, 353.6, 300.3, 298.8, 300.0),
}
ISSUE_184_THRESHOLDS = (64, 128, 256, 512)
# The same user's log (#175): KV tokens of SP=4 without shift.
ISSUE_184_KV_TOKENS = 615_728

# Not published but measured, in the first try that issue 8 of this project reports: seconds to the first token of 1,024
# tokens on this project's CPU machine, ranks in network namespaces. (P, Mbit/s) -> TP=P, SP=P.
SLOW_NETWORK: dict[tuple[int, int], tuple[float, float]] = {
    (2, 400): (2.96, 1.95),
    (4, 400): (3.8, 2.0),
    (4, 200): (6.05, 2.2),
}
