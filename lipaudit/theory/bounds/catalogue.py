"""What each bound says, where it holds, and where it comes from; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AT_X = "at X"
BALL = "ball ||X' - X||_F <= r"
EVERYWHERE = "all inputs with every ||x_i|| <= R"


@dataclass(frozen=True)
class Bound:
    """What a bound says and where.

    Attributes:
        name: its column.
        domain: where it holds.
        status: "certified" for a Lipschitz constant on a domain; "bound" for an upper bound of the
            Jacobian norm at X, which says nothing of other inputs.
        source: paper and theorem.
        formula: in the symbols of the paper.
        meaning: one line for a reader of the report.
        null: when it cannot be given.
    """

    name: str
    domain: str
    status: Literal["certified", "bound"]
    source: str
    formula: str
    meaning: str
    null: str = ""


AFFINE_ONLY = "needs self-attention with affine projections, logits s q k^T and no sink"

BOUNDS: dict[str, Bound] = {
    bound.name: bound
    for bound in (
        Bound(
            "hu",
            BALL,
            "certified",
            "Hu et al. 2024, as Yudin et al. 2025 Theorem 1",
            "N(N+1) (||X||_F + r)^2 (||W_V|| ||W_Q|| ||W_K|| + ||W_V||)",
            "Lipschitz constant on the ball by weight norms alone",
            f"{AFFINE_ONLY}; no bound where N(N+1) (||X||_F + r)^2 < sqrt N",
        ),
        Bound(
            "castin",
            EVERYWHERE,
            "certified",
            "Castin et al. 2024, as Yudin et al. 2025 Theorem 2",
            "sqrt(3) ||W_V|| (||A||^2 R^4 (4N+1) + N)^(1/2)",
            "Lipschitz constant over all token sequences of radius R",
            AFFINE_ONLY,
        ),
        Bound(
            "mean_field",
            EVERYWHERE,
            "certified",
            "ours, after the mean-field bound of Castin et al. 2024",
            "||W_V|| ((1 + a) min(e^a, sqrt N) + a), a = ||A|| R^2; sqrt N alone if masked",
            "Lipschitz constant that stops growing with the number of tokens",
            AFFINE_ONLY,
        ),
        Bound(
            "theorem3",
            AT_X,
            "bound",
            "Yudin et al. 2025 Theorem 3; a general form of ours where heads are not affine",
            "||W_V|| (||P|| + 2 ||X||^2 ||A|| max_i ||M(P_i)||)",
            "attention distribution times the size of tokens and weights",
        ),
        Bound(
            "theorem3_g1",
            AT_X,
            "bound",
            "Yudin et al. 2025 equation 7",
            "theorem3 with g_1(P_i) for ||M(P_i)||",
            "the same from the two largest entries of each row",
        ),
        Bound(
            "appendix_c",
            AT_X,
            "bound",
            "Yudin et al. 2025 Appendix C",
            "||W_V|| (||P|| + 2 max_i ||X^T M(P_i)|| ||X|| ||A||)",
            "theorem3 with only the tokens that a row attends to",
            AFFINE_ONLY,
        ),
        Bound(
            "sharp",
            AT_X,
            "bound",
            "ours",
            "min(theorem3, ||B||), B_ij = P_ij beta_ij + delta_ij s ||T_i Phi^q_i||",
            "norm of the matrix of block-norm bounds, usually within a factor of two",
        ),
    )
}

SYMBOLS = (
    "X tokens, N of them; R = max_i ||x_i||; P attention map, P_i a row; M(p) = diag(p) - p p^T; "
    "A = s W_Q W_K^T with s the scale of the logits. With biases X is [X 1] and W is [W; b^T]."
)
"""The symbols of the formulas."""
