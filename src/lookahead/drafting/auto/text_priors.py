"""Where learning begins if texts are all there is to learn from: a weight of each feature for each length, 0 to 6, of
the longest known context.

Fitted to every second one of recorded answers of large models: steps of software agents, edits of code, and answers in
chats, each alone and after those before it. `benchmarks/fit_text_priors.py` fits them again, and writes this file:

    python benchmarks/fit_text_priors.py agent_traces.jsonl code_edits.jsonl answers.jsonl
        --output src/lookahead/drafting/auto/text_priors.py
"""

from __future__ import annotations

TEXT_PRIORS: dict[str, tuple[float, ...]] = {
    "nothing": (2.49, 0.42, -0.47, -1.34, -1.57, -1.98, -2.44),
    "after 1 token": (0.00, 0.51, 0.29, 0.32, 0.20, 0.11, -0.05),
    "after 2 tokens": (0.00, 0.00, 0.18, 0.13, 0.14, 0.12, -0.03),
    "after 3 tokens": (0.00, 0.00, 0.00, 0.14, 0.11, 0.19, 0.15),
    "after 4 tokens": (0.00, 0.00, 0.00, 0.00, 0.04, -0.08, 0.03),
    "after 5 tokens": (0.00, 0.00, 0.00, 0.00, 0.00, 0.16, 0.03),
    "after 6 tokens": (0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.35),
    "match of 2 tokens": (3.75, 2.49, 0.35, 0.67, 0.65, 0.98, 1.24),
    "match of 3 tokens": (3.47, 2.78, 2.53, 0.25, 1.33, 0.57, 1.61),
    "match of 4 tokens": (4.54, 3.38, 3.28, 2.53, 0.37, 0.22, 1.66),
    "match of 6 tokens": (4.85, 3.23, 3.33, 3.47, 2.48, 2.48, 0.02),
    "match of 9 tokens": (5.58, 4.94, 4.69, 4.51, 3.42, 3.42, 0.93),
    "match of 16 tokens": (5.77, 5.78, 5.62, 5.73, 4.88, 4.88, 3.14),
    "match of 24 tokens": (4.91, 4.85, 4.88, 4.81, 4.90, 4.90, 3.52),
    "match of 32 tokens": (6.59, 6.59, 6.59, 6.59, 6.66, 6.66, 3.71),
    "further matches": (0.44, 0.50, 0.16, 0.33, 0.29, 1.60, -0.01),
    "neighbours": (0.45, 0.45, 0.45, 0.45, 0.45, 0.45, 0.45),
    "rejected siblings": (0.12, 0.03, 0.01, -0.02, -0.02, -0.02, -0.02),
    "predicted text": (0.53, 0.02, 0.09, 0.16, 0.10, 0.03, 0.04),
}
