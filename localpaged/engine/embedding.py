"""What is done to a prompt's mean hidden state before anybody gets it. Knows no tensors."""

import math


def unit_length(vector: list[float]) -> list[float]:
    """The vector over its length, so that products of two are cosines; one of zeros stays so."""
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else vector
