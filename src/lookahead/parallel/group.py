"""Ranks that decode one text together, and the session through which `generate` uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from lookahead.backends.base import Call, CallSession, Prompts
from lookahead.backends.session import open_session
from lookahead.backends.transformers.findings import model_identity
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.config import BUDGETED, LookaheadConfig
from lookahead.core.sequence import SequenceState
from lookahead.drafting import FIXED_BUDGET
from lookahead.errors import InvalidArgumentError, ParallelError, UnsupportedArgumentError, UnsupportedModelError
from lookahead.parallel.exchange import Exchange, Monitor, agree, settings, share_random_state
from lookahead.parallel.launcher import check_memory, environment_number, started_together
from lookahead.parallel.runner import ParallelRunner
from lookahead.values import finite_number, require, whole_number
from lookahead.version import __version__

TIMEOUT = 60.0
"""Seconds after which a rank that misses an exchange counts as hung."""

_LONGEST_WAIT = 10**8


class ParallelGroup:
    """Ranks that decode one text together, made by `join`. Pass it to `lookahead.generate(..., parallel=group)`.

    Every rank holds the model and makes the same calls with the same arguments; each gets the same text. After an
    error the group cannot be used again: restart the processes.

    Args:
        exchange: Communication with the other ranks.
        tensor_mesh: Ranks that share one copy of the model with this one; `None` without tensor parallelism.
        owns_processes: Whether `close` ends `torch.distributed` too.

    Attributes:
        rank: Index of this rank in the group, from 0. Rank 0 serves streamers and `on_step`.
        size: Number of ranks in the group.
        tensor_mesh: The argument of that name.
    """

    def __init__(self, exchange: Exchange, tensor_mesh: DeviceMesh | None = None, owns_processes: bool = False) -> None:
        self.rank = exchange.rank
        self.size = exchange.size
        self.tensor_mesh = tensor_mesh
        self._exchange = exchange
        self._owns_processes = owns_processes
        self._closed = False

    def open_session(self, model: PreTrainedModel) -> RanksSession:
        """Return the session that runs `model` on all ranks.

        Raises:
            ParallelError: The group was closed.
        """
        if self._closed:
            raise ParallelError("parallel: this group was closed; join a new one")
        return RanksSession(self._exchange, model)

    def close(self) -> None:
        """Leave the group. `torch.distributed` keeps running if it was initialised before `join`."""
        if self._closed:
            return
        self._closed = True
        self._exchange.leave()
        if self._owns_processes and self._exchange.failure is None:
            dist.destroy_process_group()

    def __enter__(self) -> ParallelGroup:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._exchange.report(error)
        self.close()


class RanksSession(CallSession):
    """A model that all ranks run together. `speaks` says whether this rank serves streamers and `on_step`."""

    refuses_inputs = "one process has to read it; leave parallel out"

    def __init__(self, exchange: Exchange, model: PreTrainedModel) -> None:
        self._exchange = exchange
        self._model = model
        self.speaks = exchange.rank == 0

    def settle(self, config: LookaheadConfig) -> LookaheadConfig:
        """Return `config` with fixed values for all choices that ranks would otherwise make separately.

        Raises:
            UnsupportedArgumentError: `memory` is one that ranks cannot keep equal.
        """
        check_memory(config, self._exchange.size)
        if config.memory == "process":  # the ranks' processes may have learned from different calls
            config = replace(config, memory="request")
        if config.preset in BUDGETED and config.step_budget is None:
            # A measured budget would differ between ranks, as each has its own clock.
            config = replace(config, step_budget=FIXED_BUDGET * self._exchange.size)
        return config if self.speaks else replace(config, trace=None)  # one rank records, for all

    def begin(self, prompts: Prompts, config: LookaheadConfig, generation_config: GenerationConfig) -> RanksCall:
        """Acquire the resources of a call on this rank, compare the call between ranks, and share a random state.

        Raises:
            UnsupportedArgumentError: The steps of this model cannot be split among ranks.
            ParallelError: The ranks disagree, or the group has ended.
        """
        local = open_session(self._model).begin(prompts, config, generation_config)
        if not isinstance(local.runner, ModelRunner):
            raise UnsupportedArgumentError(
                f"parallel is not supported for {type(self._model).__name__}: ranks split the branches of token trees, "
                "and this model does not run trees in transformers; leave parallel out"
            )
        values = {
            "the version": (__version__, torch.__version__, transformers.__version__),
            "the model": model_identity(self._model),
            "lookahead_config": replace(config, trace=None),
            "the generation configuration": settings(generation_config),
            "input_ids": prompts.input_ids,
            "attention_mask": prompts.mask,
        }
        agree(self._exchange, values)
        # In greedy calls too: a user's own processors may draw random numbers.
        share_random_state(self._exchange, prompts.input_ids.device)
        return RanksCall(self._exchange, local, local.runner)


class RanksCall(Call):
    """Resources of a call on all ranks; `local` holds this rank's part."""

    runner: ModelRunner

    def __init__(self, exchange: Exchange, local: Call, runner: ModelRunner) -> None:
        self._exchange = exchange
        self._local = local
        self.runner = runner
        self.clock = local.clock
        self.keeps_cache = local.keeps_cache
        self.invariant_rows = local.invariant_rows
        self.model_holds = local.model_holds
        self.rows = local.rows

    def backend(self, sequences: Sequence[SequenceState], asks_others: bool) -> ParallelRunner:
        """Return the runner of the trees of all ranks, which verifies drafts on all of them together."""
        needs_logits = any(sequence.sampler.needs_logits for sequence in sequences)
        # Ranks may disagree on other stopping criteria, a time limit for example.
        return ParallelRunner(self.runner, self._exchange, len(sequences), alone=not asks_others and not needs_logits)

    def restore(self, error: BaseException) -> None:
        """Undo the changes of the call, and report `error` to the other ranks."""
        self._local.restore(error)
        self._exchange.report(error)

    def release(self, keep_cache: bool) -> Cache | None:
        """Release the resources of this rank."""
        return self._local.release(keep_cache)


def join(
    timeout: float = TIMEOUT,
    tensor_parallel: int = 1,
    device_type: str | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> ParallelGroup:
    """Join the other processes of this run. All of them must call this.

    Start the processes with `torchrun`, or with another launcher that lets `torch.distributed.init_process_group` work
    without arguments. `torch.distributed` may also be initialised already, with any backend. Tokens are exchanged over
    a separate `gloo` group, since Python writes and reads them in main memory.

    Args:
        timeout: Seconds after which a silent rank with open connections counts as hung. Be generous: on a busy machine
            a step may take long. A dead process is noticed at once. Load the models first: the first exchange waits for
            all ranks.
        tensor_parallel: Number of processes that share one copy of the model, by transformers' tensor parallelism.
            Load the model in each process, then call `shard_model(model, group.tensor_mesh)`. 1 for a whole copy each.
        device_type: Device of the models, `"cuda"` or `"cpu"`; needed only for `tensor_parallel`. By default a GPU
            if the machine has one.
        process_group: Processes that decode together, by default all; a group that carries CPU tensors. Only its
            members call this.

    Raises:
        InvalidArgumentError: The processes were not started together, or do not divide into copies of the model.
        ParallelError: The processes did not find each other.
    """
    timeout = finite_number("timeout", timeout, "must be seconds, above 0")
    require(0 < timeout < _LONGEST_WAIT, "timeout", timeout, f"must be seconds, above 0 and below {_LONGEST_WAIT}")
    tensor_parallel = whole_number("tensor_parallel", tensor_parallel, 1)
    is_known = device_type in (None, "cpu", "cuda")
    require(is_known, "device_type", device_type, "must be 'cpu' or 'cuda', or None for the device of the machine")
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    owns_processes = not dist.is_initialized()
    if owns_processes:
        if started_together():
            environment_number("RANK", 0, environment_number("WORLD_SIZE", 1) - 1)
            environment_number("MASTER_PORT", 0, 2**16 - 1)
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=max(timeout, 2 * TIMEOUT)))
        except ValueError as error:
            raise InvalidArgumentError(
                f"parallel: this process was not started together with others ({error}); start it with torchrun, or "
                "call torch.distributed.init_process_group first"
            ) from error
        except RuntimeError as error:
            raise ParallelError(
                f"parallel: the processes of a run did not find each other ({str(error).splitlines()[0]}); start all "
                "of them, with the same MASTER_ADDR and MASTER_PORT"
            ) from error
    world = dist.get_world_size()
    this_rank = dist.get_rank()
    divides = world % tensor_parallel == 0
    require(divides, "tensor_parallel", tensor_parallel, f"must be a divisor of {world} processes")
    if process_group is None:  # the ranks that hold the same part of the model
        parts = [list(range(part, world, tensor_parallel)) for part in range(tensor_parallel)]
        names = parts[this_rank % tensor_parallel]
        # Longer than any wait of ours, as the error of the group's own time-out names no rank.
        patience = timedelta(seconds=2 * timeout + TIMEOUT)
        group, _ = dist.new_subgroups_by_enumeration(parts, patience, "gloo")  # type: ignore[no-untyped-call]
    else:
        group = process_group
        names = dist.get_process_group_ranks(process_group)
        require(tensor_parallel == 1, "tensor_parallel", tensor_parallel, "must be 1 with a process_group")
    mesh = None
    if tensor_parallel > 1:
        shape = (world // tensor_parallel, tensor_parallel)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=("lookahead", "tensor"))["tensor"]
    store = PrefixStore(f"lookahead/{group.group_name}", _get_default_store())
    monitor = Monitor(store, names.index(this_rank), len(names))
    return ParallelGroup(Exchange(group, monitor, names, timeout), mesh, owns_processes)


def shard_model(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split the weights of `model` among the ranks of `mesh`, by transformers' plan for the model.

    `from_pretrained(..., tp_plan="auto")` splits one copy over all processes of the run; this splits one copy over the
    processes in `mesh`. Each process loads the whole model first, and keeps its part.

    Args:
        model: Loaded in the same way on all ranks; changed in place.
        mesh: `ParallelGroup.tensor_mesh`.

    Raises:
        UnsupportedModelError: transformers has no plan for the model.
    """
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    if not plan:
        raise UnsupportedModelError(
            f"model={type(model).__name__} has no plan for tensor parallelism in transformers; join with "
            "tensor_parallel=1, so that each rank holds all of it"
        )
    apply_tensor_parallelism(model, mesh, plan)
