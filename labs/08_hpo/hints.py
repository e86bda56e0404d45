"""Three hints for each question: a nudge, a pointer, a sketch."""

HINTS = {
    "scale": [
        "On a linear scale the value moves by equal steps, on a logarithmic one by equal factors.",
        "Go from log(low) to log(high) linearly, then take the exponential.",
        "low + place * (high - low); and low * (high / low) ** place.",
    ],
    "interval": [
        "Begin with the N differences. What does left[chosen] look like, when chosen is (draws, N)?",
        "(left - right)[chosen] is (draws, N): one mean for each row.",
        "torch.quantile(means, (1 - level) / 2) and torch.quantile(means, 1 - (1 - level) / 2), as floats.",
    ],
    "process": [
        "Write a function kernel(a, b) first that returns (rows of a, rows of b).",
        "a[:, None] - b[None] has shape (A, B, d); square, sum over the last dimension. Noise goes on the diagonal of kernel(points, points) only.",
        "weights = torch.linalg.solve(K, kernel(points, new)); mean = weights.T @ values; variance = 1 - (kernel(points, new) * weights).sum(0).",
    ],
    "improvement": [
        "Lower is better: the gain is best - mean, and it may be negative.",
        "std of 0 makes z a division by 0: clamp std for z, and choose with torch.where(std > 0, ..., ...).",
        "gain * torch.special.ndtr(z) + std * density where std > 0, else gain.clamp(min=0).",
    ],
    "length": [
        "One number for each length; the largest decides. The term with 2 pi is the same for all.",
        "K is the matrix of the step before, with the noise on its diagonal.",
        "max(lengths, key=...), with -0.5 * values @ torch.linalg.solve(K, values) - 0.5 * torch.logdet(K).",
    ],
    "next": [
        "Three calls of functions that you have written, after one line that standardises.",
        "`best` is the lowest of the *standardised* values.",
        "scaled = (values - values.mean()) / values.std(correction=0); best_length; posterior; expected_improvement(...).argmax(), as an int.",
    ],
    "halving": [
        "Rungs: a loop that divides trials and multiplies epochs, as long as both are allowed.",
        "survivors: sort the numbers, with a key. Tuples compare their first entry first: (is it NaN, loss, number).",
        "sorted(range(len(losses)), key=lambda i: (math.isnan(losses[i]), losses[i], i))[:keep]; think about what two NaN in a tuple do.",
    ],
    "hyperband": [
        "Find s_max by multiplying: the largest s with eta ** s <= most.",
        "Rounding up with whole numbers: -(-a // b).",
        "[(-(-(s_max + 1) * eta**s // (s + 1)), most // eta**s) for s from s_max down to 0].",
    ],
    "asha": [
        "For one rung: rank its trials, take the first len // eta, leave out who has gone on. Which one is left first?",
        "Loop over the rungs from len(reported) - 2 down to 0. Rank *all* that reported, promoted or not.",
        "for trial in ranked[: len(ranked) // eta]: if trial not in promoted[rung]: return (trial, rung). After the loops: None.",
    ],
    "prune": [
        "The epoch is len(losses). Whose losses at that epoch are known?",
        "In this order: NaN stops; warm-up and too few trials go on; then the median decides.",
        "told = [other[epoch - 1] for other in others if len(other) >= epoch]; min(losses) > median of told.",
    ],
    "population": [
        "Rank all members with survivors(losses, len(losses)). Who are the first q, who the last q?",
        "Only the last q change. A member's parent is best[picks[member]]; its learning rate comes from the parent's.",
        "parents = list(range(n)); for member in ranked[-q:]: parents[member] = ranked[picks[member]]; rate = min(high, max(low, rates[parent] * 1.2 or 0.8)).",
    ],
    "quiz": [
        "Each answer is in one of your measurements, or in the text above it.",
        "q1: count the ticks below the first picture. q2: the two terms of EI. q3: the white in the two timelines.",
        "q4: what does halving throw away when early ranks mean nothing? q5: is 0 inside the interval?",
    ],
}
