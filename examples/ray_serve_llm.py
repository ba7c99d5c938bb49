"""Ray Serve LLM with vLLM and our drafts: `make ray-serve-llm`, in the environment of `make build/vllm`.

Ray Serve LLM routes OpenAI's protocol to replicas of vLLM; only `engine_kwargs` name our proposer. If a replica dies,
its requests end in an error of status 500; clients may send them again.

    python examples/ray_serve_llm.py --model PATH                 # serves until Ctrl-C
    python examples/ray_serve_llm.py --load --output rows.jsonl   # 200 requests of 16 clients, and a replica is killed
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app

import load

SECONDS = 60.0
HOST, PORT, NAME = "127.0.0.1", 8766, "model"
DRAFTS = {
    "method": "custom_class",
    "model": "lookahead.integrations.vllm.LookaheadProposer",
    "num_speculative_tokens": 8,
}


def start(model: str, replicas: int = 2) -> None:
    """Start Ray on only this machine, and the replicas."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    ray.init(
        num_cpus=8,  # nominal: the sum that replicas, groups and front request
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address=HOST,
    )
    config = LLMConfig(
        model_loading_config={"model_id": NAME, "model_source": model},
        accelerator_type=None,
        placement_group_config={"bundles": [{"CPU": 1}]},
        deployment_config={"num_replicas": replicas, "health_check_period_s": 2},
        runtime_env={"env_vars": environment},
        engine_kwargs={
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "speculative_config": DRAFTS,
        },
    )
    serve.start(http_options={"host": HOST, "port": PORT, "request_timeout_s": SECONDS})
    serve.run(build_openai_app({"llm_configs": [config]}))


def measure(requests: int, clients: int) -> dict[str, Any]:
    """Run a load; one replica is killed after a third of the requests."""

    def send(number: int) -> load.Answer:
        body = {"model": NAME, "prompt": load.PROMPTS[number % len(load.PROMPTS)], "max_tokens": 48, "temperature": 0}
        return load.ask(PORT, "/v1/completions", body, {}, SECONDS + 15)

    for number in range(8):
        send(number)
    begin = time.monotonic()
    answers, _ = load.run(send, lambda: load.kill_one("LLMServer"), requests, clients, requests // 3)
    row = load.summary(answers, time.monotonic() - begin)
    row["texts"] = len({answer.body["choices"][0]["text"] for answer in answers if answer.ended == "answered"})
    return row


if __name__ == "__main__":
    load.main(__doc__, "ray_serve_llm", f"http://{HOST}:{PORT}/v1", start, measure)
