"""Ray Serve with an engine of this library in each replica: `make ray-serve`.

A front accepts requests over HTTP and sends them to the replicas. Requests of one session (`X-Session-Id`) go to the
same replica, as its n-gram memory and prefix cache know the conversation. If a replica dies, its requests are sent to
another one within their time limit: greedy and seeded texts are equal on all replicas.

    python examples/ray_serve.py --model PATH                 # serves until Ctrl-C
    python examples/ray_serve.py --load --output rows.jsonl   # 200 requests of 16 clients, and a replica is killed
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from starlette.requests import Request
from starlette.responses import JSONResponse

import load

SECONDS = 60.0
"""Time limit of a request."""

HOST, PORT = "127.0.0.1", 8765
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
LOST = (RayActorError, ReplicaUnavailableError)
"""Errors of a lost replica, which do not depend on the request."""


@serve.deployment(
    num_replicas=2,
    max_ongoing_requests=16,
    health_check_period_s=2,
    ray_actor_options={"num_cpus": 0.5},
    request_router_config=RequestRouterConfig(request_router_class=ROUTER),
)
class Decoder:
    """A model and its engine; requests share passes."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from lookahead import Engine

        torch.set_num_threads(1)
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._engine = Engine(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
        self._engine.start()

    async def complete(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """Continue a text."""
        ids = self._tokenizer(prompt).input_ids
        handle = self._engine.submit(ids, max_new_tokens=max_tokens, do_sample=False)
        try:
            output = await handle.wait()
        finally:
            handle.cancel()  # no effect if done; otherwise the caller has disconnected
        text = self._tokenizer.decode(output[0, len(ids) :])
        return {"text": text, "steps": handle.statistics.steps, "replica": os.getpid()}


@serve.deployment(max_ongoing_requests=256, ray_actor_options={"num_cpus": 0.2})
class Front:
    """Accept requests, and send each to a replica."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    async def __call__(self, request: Request) -> JSONResponse:
        """Answer `{"prompt": ..., "max_tokens": ...}`."""
        try:
            body = await request.json()
            prompt, most = str(body["prompt"]), int(body.get("max_tokens", 64))
        except (ValueError, KeyError, TypeError):
            return JSONResponse({"error": 'send {"prompt": TEXT, "max_tokens": NUMBER}'}, 400)
        session = request.headers.get("x-session-id", "")
        end, retries = time.monotonic() + SECONDS, 0
        while True:
            left = end - time.monotonic()
            try:
                call = self._decoder.options(session_id=session).complete.remote(prompt, most)
                answer = await asyncio.wait_for(call, max(left, 0.01))
                return JSONResponse({**answer, "retries": retries})
            except asyncio.TimeoutError:
                return JSONResponse({"error": f"no answer within {SECONDS:.0f} seconds"}, 504)
            except BackPressureError:
                return JSONResponse({"error": "all replicas are busy; try again later"}, 503)
            except LOST:
                retries += 1
                await asyncio.sleep(min(0.2 * retries, 2.0))


def start(model: str) -> None:
    """Start Ray on only this machine, and the deployments."""
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": environment},
        _node_ip_address=HOST,
    )
    serve.start(http_options={"host": HOST, "port": PORT, "request_timeout_s": SECONDS + 10})
    serve.run(Front.bind(Decoder.bind(model)))


def measure(requests: int, clients: int) -> dict[str, Any]:
    """Run a load of sixteen sessions; one replica is killed after a third of the requests."""

    def send(number: int) -> load.Answer:
        body = {"prompt": load.PROMPTS[number % len(load.PROMPTS)], "max_tokens": 48}
        return load.ask(PORT, "/", body, {"X-Session-Id": f"session {number % 16}"}, SECONDS + 15)

    for number in range(8):  # both replicas compile their loops
        send(number)
    begin = time.monotonic()
    answers, killed = load.run(send, lambda: load.kill_one("Decoder"), requests, clients, requests // 3)
    row = load.summary(answers, time.monotonic() - begin)
    answered = [answer.body for answer in answers if answer.ended == "answered"]
    row["retried"] = sum(body["retries"] > 0 for body in answered)
    row["texts"] = len({body["text"] for body in answered})
    row["replicas"] = len({body["replica"] for body in answered})
    row["by_killed_replica"] = sum(body["replica"] == killed for body in answered)
    return row


if __name__ == "__main__":
    load.main(__doc__, "ray_serve", f"http://{HOST}:{PORT}", start, measure)
