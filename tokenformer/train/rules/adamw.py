"""AdamW, PyTorch's own, fused. `Role.decays` of models/names.py says which parameters decay.

Unusual: the divisor and the skip flag stay on the device, where the fused kernels read them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tokenformer.config_train import OptimizerConfig
from tokenformer.models.names import Role
from tokenformer.parallel.layout import Layout
from tokenformer.train.rules import Learner, State


class AdamW:
    """Keeps `exp_avg`, `exp_avg_sq` and a `step` of its own for each parameter."""

    def __init__(self, learners: Mapping[str, Learner], config: OptimizerConfig, layout: Layout) -> None:
        self.parameters = {name: learner.parameter for name, learner in learners.items()}
        groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
        for parameter, role, share in learners.values():
            alike = config.weight_decay if role.decays else 0.0, 1.0 if share is None else share
            groups.setdefault(alike, []).append(parameter)
        self.torch = torch.optim.AdamW(
            [{"params": parameters, "weight_decay": d, "share": share} for (d, share), parameters in groups.items()],
            lr=config.rate,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True,
        )

    @staticmethod
    def wants(role: Role) -> bool:
        return True

    def step(self, rate: float, divisor: Tensor, skip: Tensor) -> None:
        vars(self.torch).update(grad_scale=divisor, found_inf=skip)
        if divisor.dtype == torch.float64:  # of which the kernels read no scale
            torch._foreach_div_([p.grad for p in self.parameters.values() if p.grad is not None], divisor)
            vars(self.torch).update(grad_scale=None)
        for group in self.torch.param_groups:
            group["lr"] = rate * group["share"]
        self.torch.step()

    def state_by_name(self) -> State:
        return {name: dict(self.torch.state[p]) for name, p in self.parameters.items() if p in self.torch.state}

    def load_state_by_name(self, state: State) -> None:
        self.torch.state.clear()
        for name, p in self.parameters.items():
            if name in state:
                step = state[name]["step"].to(device=p.device, dtype=torch.float32, copy=True)
                moments = {key: state[name][key].to(p, copy=True) for key in ("exp_avg", "exp_avg_sq")}
                self.torch.state[p] = {"step": step, **moments}
