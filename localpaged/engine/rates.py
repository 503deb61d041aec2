"""How fast this machine computes, as measured by its own steps: what prices are made of. Knows numbers only."""

# The weight of a new measurement: what was measured long ago counts little, one slow step not much.
WEIGHT = 0.2
# Steps with fewer prompt tokens say little about prefill.
MEASURED_PREFILL_TOKENS = 32
FIRST_PREFILL_TOKENS_S = 300.0
FIRST_STEP_S = 0.05


class Rates:
    """Exponential averages of the time of steps, by what they computed."""

    def __init__(self) -> None:
        self.prefill_tokens_s = FIRST_PREFILL_TOKENS_S
        self._step_s: dict[int, float] = {}
        self._measured_prefill = False

    def observe(self, num_decodes: int, num_prefilled: int, elapsed_s: float) -> None:
        """Note a step. Steps that do both tell of neither, unless prefill is nearly all of them."""
        if elapsed_s <= 0:
            return
        if num_prefilled >= max(MEASURED_PREFILL_TOKENS, 8 * num_decodes):
            rate = num_prefilled / elapsed_s
            weight = WEIGHT if self._measured_prefill else 1.0
            self.prefill_tokens_s += weight * (rate - self.prefill_tokens_s)
            self._measured_prefill = True
        elif num_decodes and not num_prefilled:
            before = self._step_s.get(num_decodes, elapsed_s)
            self._step_s[num_decodes] = before + WEIGHT * (elapsed_s - before)

    def step_s(self, num_rows: int) -> float:
        """Seconds of a step that decodes so many rows: measured, or between the nearest that were.

        Beyond the largest measured number the time grows in proportion, below the smallest it stays.
        """
        known = sorted(self._step_s)
        if not known:
            return FIRST_STEP_S
        above = next((rows for rows in known if rows >= num_rows), None)
        below = next((rows for rows in reversed(known) if rows <= num_rows), None)
        if above is None:
            return self._step_s[known[-1]] * num_rows / known[-1]
        if below is None:
            return self._step_s[above]
        if above == below:
            return self._step_s[above]
        part = (num_rows - below) / (above - below)
        return self._step_s[below] + part * (self._step_s[above] - self._step_s[below])
