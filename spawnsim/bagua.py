"""The names of bagua's asynchronous model averaging: `bagua.torch_api.algorithms.async_model_average`.

    algorithm = AsyncModelAverageAlgorithm(sync_interval_ms=100, warmup_steps=10)
    model = with_bagua(model, [optimizer], algorithm)          # bagua: model.with_bagua([optimizer], algorithm)
    ...                                                        # train: nothing else changes
    model.bagua_algorithm.abort(model)
    ...                                                        # evaluate
    model.bagua_algorithm.resume(model)

`spawnsim.policies.AsyncModelAveragePolicy` does the work, and documents its guarantees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spawnsim.comm import Comm, as_comm
from spawnsim.comm.backends import world
from spawnsim.errors import UsageError
from spawnsim.policies import AsyncModelAveragePolicy
from spawnsim.policies.state.layout import collect
from spawnsim.torchgfn.distributed import broadcast

if TYPE_CHECKING:
    import torch


class AsyncModelAverageAlgorithm:
    """Settings of model averaging; `with_bagua` applies them to one model.

    Training is treated as an endless stream: ranks step at their own pace, and their numbers of iterations differ.

    Args:
        peer_selection_mode: "all", or a mode of spawnsim: "ring", "shift_one", "random".
        sync_interval_ms: milliseconds between averagings.
        warmup_steps: steps with gradients averaged over the group, before averaging by the clock begins.
        more: further arguments of `AsyncModelAveragePolicy`, such as `patience_s`.
    """

    def __init__(
        self,
        peer_selection_mode: str = "all",
        sync_interval_ms: float = 500,
        warmup_steps: int = 0,
        **more: Any,
    ) -> None:
        self.peer_selection_mode, self.sync_interval_ms = peer_selection_mode, sync_interval_ms
        self.warmup_steps, self.more = warmup_steps, more
        # Constructed only to check the arguments.
        AsyncModelAveragePolicy(peer_selection_mode, sync_interval_ms, warmup_steps, **more)

    def reify(self, process_group: Any = None) -> AsyncModelAverageAlgorithmImpl:
        """Return the algorithm's implementation over a group, for one model."""
        return AsyncModelAverageAlgorithmImpl(
            process_group, self.peer_selection_mode, self.sync_interval_ms, self.warmup_steps, **self.more
        )


class AsyncModelAverageAlgorithmImpl:
    """The algorithm's implementation on one rank, for one model.

    `process_group` is a spawnsim `Comm`, an mpi4py communicator, a group of torch.distributed, or None for the world of
    the job. After `comm.recover()` set it to the survivors' communicator. The other arguments are as in
    `AsyncModelAverageAlgorithm`. A copy or a pickle of the model is not averaged: None replaces this object there.
    """

    # fmt: off
    def __init__(
        self, process_group: Any, peer_selection_mode: str = "all", sync_interval_ms: float = 500,
        warmup_steps: int = 0, **more: Any,
    ) -> None:
        # fmt: on
        self.peer_selection_mode, self.sync_interval_ms = peer_selection_mode, sync_interval_ms
        self.warmup_steps = warmup_steps
        self.policy = AsyncModelAveragePolicy(peer_selection_mode, sync_interval_ms, warmup_steps, **more)
        self.process_group: Comm = world() if process_group is None else as_comm(process_group)
        self._module: torch.nn.Module | None = None
        self._optimizer: Any = None
        self._steps = 0

    def attach(self, bagua_module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Average this model from now on, after each step of the last of its optimizers. Collective."""
        if self._module is not None or not optimizers:
            raise UsageError("give an algorithm that no other model uses yet, and at least one optimizer")
        self._module, self._optimizer = bagua_module, optimizers[0]
        # Before the policy is attached: its background task must not average a model that is still being overwritten.
        for tensor in collect(bagua_module, None, self.policy.travels).values():
            broadcast(tensor, 0, group=self.process_group)
        self.policy.attach(bagua_module, optimizers[0], self.process_group)
        # After the last optimizer's step the model is complete; between two of them an average would mix old and new
        # parts.
        optimizers[-1].register_step_post_hook(lambda *_: self._stepped())

    def _stepped(self) -> None:
        assert self._module is not None
        self.policy(self._steps, self._module, self._optimizer, group=self.process_group)
        self._steps += 1

    def abort(self, bagua_module: torch.nn.Module) -> bool:
        """Stop averaging this rank's model: it is neither used nor changed until `resume`.

        In bagua all ranks must call it. Here any rank may call it alone: the other ranks continue without it.
        Returns whether the exchanges under way ended within the policy's patience.
        """
        self._check(bagua_module)
        return self.policy.abort()

    def resume(self, bagua_module: torch.nn.Module) -> None:
        """Average again; on all ranks, or only on this one."""
        self._check(bagua_module)
        self.policy.resume()

    def shutdown(self) -> None:
        """Leave for good, and hand over the state that other ranks rely on. Not needed after all ranks' `abort`."""
        self.policy.shutdown()

    def _check(self, bagua_module: torch.nn.Module) -> None:
        if bagua_module is not self._module:
            raise UsageError("this algorithm serves another model: pass the model that with_bagua returned")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def with_bagua(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    algorithm: AsyncModelAverageAlgorithm,
    process_group: Any = None,
) -> torch.nn.Module:
    """Average a model during training, and return it; `model.bagua_algorithm` has `abort` and `resume`.

    Collective: as in bagua all ranks start from the parameters and buffers of rank 0. Averaging happens between the
    steps of `optimizers`, so the training loop is unchanged.

    Args:
        model: the model, with equal layouts on all ranks; the values may differ.
        optimizers: the model's optimizers, in the order in which they step.
        algorithm: the settings of averaging.
        process_group: the participating ranks; None: all ranks of the job. (In bagua it is a method's argument.)
    """
    if getattr(model, "bagua_algorithm", None) is not None:
        raise UsageError("with_bagua: the model already has an algorithm")
    implementation = algorithm.reify(process_group)
    implementation.attach(model, optimizers)
    model.bagua_algorithm = implementation  # type: ignore[assignment]  # a module's attributes may be anything
    return model


__all__ = ["AsyncModelAverageAlgorithm", "AsyncModelAverageAlgorithmImpl", "with_bagua"]
