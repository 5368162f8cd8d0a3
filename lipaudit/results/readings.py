"""How to read figures that several sections have."""

from __future__ import annotations

PROVEN = (
    "With probability 0.999 the norm is at most this share above what is given (largest over the "
    "samples)"
)
STOPPED = "The error was estimated at most tol and proven to stay within its limit"
WITHIN = (
    "Norms are lower estimates. The iteration stops where it estimates the error at "
    "most tol; that is no proof, and falls short where singular values crowd below the first. "
    "What is proven, for each sample with probability 0.999 over the random start vector and "
    "whatever the model: the truth is at most this share higher. Ask for less with --within; as "
    "small as tol it costs 1.4 to 2.4 times as much. 0: nothing random is left out."
)
CONVERGED = (
    "The stop rule was met: the error is estimated at most tol (no proof), and "
    "within is at most what --within asks for (proven). Otherwise the norm is a lower estimate of "
    "unknown quality: see upper."
)
UPPER = (
    "With probability 1 - eta over the random start vector the norm is not above it. Not "
    "a proof: the proven upper bounds are those of `lipaudit bounds`."
)
NORM = (
    "The largest factor by which an infinitesimal change of the input can be magnified in "
    "the output, at each sample. It says nothing of how far away the nearest adversarial example "
    "is: see radius_first_order for a hint and `lipaudit attack` for a trial. It is met from "
    "below: see within."
)
NEAR = (
    "The norm at X, the largest that was found near X, and the constant that nothing near X can "
    "exceed: the truth lies between the last two. An ascent is no proof, a certificate no attack."
)
ROBUST = (
    "An upper limit of the true robust accuracy: a stronger attack may break more. "
    "Compare only figures of the same attack, radius and samples."
)

CERTIFIED = (
    "A lower limit of the true robust accuracy, on these samples: no attack whatever can break "
    "what is certified, and what is not certified may stand or fall. The truth lies between it "
    "and the accuracy under attack.\n"
    "Proven of the function of real numbers that the stored weights define. A program that "
    "evaluates it in float32 rounds, and may err where a margin is as small as that."
)


def norm_of(source: str, target: str) -> str:
    """Say what the norm of a Jacobian at the samples is, and what it is not."""
    return (
        f"The largest factor by which an infinitesimal change of {source} can be magnified in "
        f"{target}, at each sample. A large change may be magnified more. The solver "
        "approaches the norm from below: see within."
    )
