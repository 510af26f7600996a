"""Averaging where tensors lie: real ranks of a job that ends with its first death."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

MODEL = """
    import torch
    from spawnsim.policies import AverageAllPolicy, Travels, one_storage
    from spawnsim.policies.exchange.group_mean import BufferedMean, InPlaceMean

    class Model(torch.nn.Module):
        def __init__(self, seed):
            super().__init__()
            draw = torch.Generator().manual_seed(seed)
            new = lambda *shape: torch.randn(shape, generator=draw)
            self.big = torch.nn.Parameter(new(700, 1100))
            self.across = torch.nn.Parameter(new(300, 200).t())
            self.halves = torch.nn.Parameter(new(40_000).bfloat16())
            self.small = torch.nn.ParameterList([torch.nn.Parameter(new(n)) for n in (1, 10, 100)])
            self.scalar = torch.nn.Parameter(new(1)[0])
            self.register_buffer("count", torch.tensor([seed, 2 * seed]))

    def averaged(models, momentum):
        out = {}
        for name in models[0].state_dict():
            parts = [model.state_dict()[name] for model in models]
            if name == "count":
                out[name] = parts[0]  # not looked at
                continue
            level = [part.float() for part in parts]
            while len(level) > 1:
                level = [a + b for a, b in zip(level[::2], level[1::2])]
            mean = level[0] / len(parts)
            mean = mean + (parts[rank].float() - mean) * momentum if momentum else mean
            out[name] = mean.to(parts[0].dtype)
        return out
"""


@pytest.mark.parametrize("momentum", [0.0, 0.25])
def test_every_kind_of_tensor_gets_the_mean_to_the_last_bit(ranks, momentum):
    """Large, across memory, half precision, small, 0-dim; apart and in one storage; also after one was moved."""
    ranks(
        MODEL
        + f"""
    expected = averaged([Model(r) for r in range(size)], {momentum})
    for together in (False, True):
        model = Model(rank)
        if together:
            one_storage(model)
            if rank == 1:
                model.halves.data = model.halves.data.clone()
        policy = AverageAllPolicy(1, momentum={momentum})
        policy(1, model, None, group=comm)
        kinds = {{type(part) for part in policy._mean[1]._parts}}
        assert kinds == {{BufferedMean, InPlaceMean}}
        for name, value in model.state_dict().items():
            assert name == "count" or torch.equal(value, expected[name]), (name, together)
        assert model.count.tolist() == [2, 3]
    """
    )


def test_a_model_in_one_storage_is_one_sum(ranks):
    """All ranks must have it so; a rank that has not makes the group gather instead, with the same result."""
    ranks(
        MODEL
        + """
    class Many(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tensors = torch.nn.ParameterList([torch.full((1000,), float(rank + i)) for i in range(30)])

    for apart in (None, 2):
        model = Many()
        if rank != apart:
            one_storage(model)
        policy = AverageAllPolicy(1)
        policy(1, model, None, group=comm)
        (part,) = policy._mean[1]._parts
        assert type(part) is (InPlaceMean if apart is None else BufferedMean)
        for step in range(2):
            assert all((p == 1.5 + i).all() for i, p in enumerate(model.tensors))
            if apart is None:  # moved apart after the group has agreed
                model.tensors[3].data = model.tensors[3].data.clone()
            policy(1, model, None, group=comm)
    """
    )
