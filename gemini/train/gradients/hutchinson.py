"""Products of the Hessian with a random vector, made of two backwards: Hutchinson's estimate of its diagonal.

The first backward is recorded (``create_graph``). Of every gradient only its product with the vector is kept, a number
that can be differentiated again, so that no gradients wait; the gradients of the sum of these numbers are the Hessian
times the vector, and arrive as those of any backward (:class:`gemini.train.passes.backward.BackwardPass`).
"""

from __future__ import annotations

from hashlib import blake2b

import torch

from gemini.errors import GeminiError


class HessianProbe:
    """One estimate.

    The vector is drawn anew for each param, from a normal distribution, on the CPU: out of the number of the estimate
    and that of the param, so that every rank and every placement has the same.
    """

    def __init__(self, number: int, params: list[torch.nn.Parameter]):
        self._number = number
        # By identity, in the order of the optimizer: all ranks draw the same vectors.
        self._places = {id(param): place for place, param in enumerate(params)}
        self._products: list[torch.Tensor] | None = []
        """None when the second backward has begun."""

    def take(self, param: torch.nn.Parameter, grad: torch.Tensor) -> torch.Tensor | None:
        """The part to keep of a gradient that has arrived: the estimate, in the second backward; else nothing."""
        place = self._places.get(id(param))
        if place is None:  # of a param of another optimizer
            return None
        vector = self.vector(place, grad)
        if self._products is None:
            return (grad.float() * vector).to(grad.dtype)
        if grad.requires_grad:
            # In fp32, and with its graph: the second backward goes through it.
            self._products.append((grad.float() * vector).sum())
        return None

    def product(self) -> torch.Tensor:
        """The gradient times the vector. What arrives from now on is the Hessian times the vector. Raises GeminiError
        if the gradient of no param depends on any.
        """
        # From here on gradients are those of the second backward.
        products, self._products = self._products, None
        if not products:
            raise GeminiError(
                "no gradient of this loss depends on a param of this optimizer: its Hessian is zero. Give a loss that "
                "the model has computed, with gradients enabled"
            )
        device = products[0].device
        return torch.stack([product.to(device) for product in products]).sum()

    def vector(self, place: int, like: torch.Tensor) -> torch.Tensor:
        """The random vector for the param at ``place`` among those of the optimizer, in the shape of ``like``."""
        seed = int.from_bytes(blake2b(f"{self._number} {place}".encode(), digest_size=8).digest(), "big")
        # On the CPU: generators of devices give other numbers, and each kind its own.
        generator = torch.Generator("cpu").manual_seed(seed)
        return torch.randn(like.shape, generator=generator, dtype=torch.float32, device="cpu").to(like.device)
