"""Learning rates of drawn programs: schedules of torch and transformers, those that read the optimizer's ``defaults``
among them, as the line that makes one.
"""

TORCH = {
    "cosine": "CosineAnnealingLR(optimizer, 4)",
    "step": "StepLR(optimizer, 1, gamma=0.5)",
    "multi_step": "MultiStepLR(optimizer, [1, 2], gamma=0.3)",
    "exponential": "ExponentialLR(optimizer, 0.7)",
    "linear": "LinearLR(optimizer, 0.3, total_iters=3)",
    "constant": "ConstantLR(optimizer, 0.25, total_iters=2)",
    "polynomial": "PolynomialLR(optimizer, 4, power=2.0)",
    "restarts": "CosineAnnealingWarmRestarts(optimizer, 1)",
    "one_cycle": "OneCycleLR(optimizer, 0.05, total_steps=8)",
    "cyclic": 'CyclicLR(optimizer, 0.005, 0.05, step_size_up=2, mode="triangular2")',
    "lambda": "LambdaLR(optimizer, lambda step: 0.9**step)",
    "multiplicative": "MultiplicativeLR(optimizer, lambda step: 0.8)",
    "plateau": "ReduceLROnPlateau(optimizer, factor=0.5, patience=0)",
    "chained": (
        "ChainedScheduler([torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "
        "torch.optim.lr_scheduler.StepLR(optimizer, 2)])"
    ),
    "sequential": (
        "SequentialLR(optimizer, [torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=1), "
        "torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)], [1])"
    ),
}

TRANSFORMERS = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "reduce_lr_on_plateau",
)  # fmt: skip

_SPECIFIC = {
    "cosine_with_min_lr": '{"min_lr": 0.001}',
    "cosine_warmup_with_min_lr": '{"min_lr": 0.001}',
    "warmup_stable_decay": '{"num_decay_steps": 2}',
    "polynomial": '{"lr_end": 0.001}',
}


def _of_transformers(name: str) -> str:
    steps = ", num_warmup_steps=1, num_training_steps=6"
    return (
        f'scheduler = transformers.get_scheduler("{name}", optimizer{steps}, '
        f"scheduler_specific_kwargs={_SPECIFIC.get(name)})"
    )


SCHEDULES = {
    **{name: f"scheduler = torch.optim.lr_scheduler.{made}" for name, made in TORCH.items()},
    "averaging": 'scheduler = torch.optim.swa_utils.SWALR(optimizer, 0.001, anneal_epochs=2, anneal_strategy="linear")',
    **{f"transformers {name}": _of_transformers(name) for name in TRANSFORMERS},
}
"""By name. Stepped once after every step of the optimizer, with a metric where the schedule waits for one."""


def stepped(name: str) -> str:
    """The lines after ``optimizer.step()``."""
    return (
        f"scheduler.step({'1.0' if 'plateau' in name else ''})\n"
        'side.see("lr", [[float(g["lr"]), *map(float, g["betas"])] for g in optimizer.param_groups])'
    )
