"""Three hints for each question: a nudge, a pointer, a sketch."""

HINTS = {
    "sweep": [
        "Think of the logarithm of the rate: it grows by the same amount each time.",
        "n rates have n - 1 gaps. The whole way is a factor of highest / lowest.",
        "lowest * (highest / lowest) ** (i / (count - 1)) for i from 0.",
    ],
    "range_test": [
        "It is a training loop with another rate in each step, and nothing must be left of it.",
        "model.state_dict() holds parameters and buffers, but not copies of them. model.training is the mode.",
        "before = {name: value.clone() ...}; in the loop: model.zero_grad(), loss, backward, p.data -= rate * p.grad under no_grad; load_state_dict(before).",
    ],
    "smoothed": [
        "One running number; after each loss it moves a little towards it.",
        "mean = beta * mean + (1 - beta) * loss, beginning with 0. After k losses the weights sum to 1 - beta ** k.",
        "curve.append(mean / (1 - beta ** k)) with k = 1, 2, ...",
    ],
    "suggest": [
        "Find the bottom first; the steepest place lies before it.",
        "The slope on the plot is the change of the loss over the change of log(rate).",
        "for i in 1 ... bottom - 1: (losses[i + 1] - losses[i - 1]) / log(rates[i + 1] / rates[i - 1]); the most negative one.",
    ],
    "decay": [
        "How many times has the rate been cut at this step? For the cosine: what share of the steps is done?",
        "step // every. And (1 + cos(pi * share)) / 2 goes from 1 to 0.",
        "gamma ** (step // every); final + (1 - final) * (1 + cos(pi * min(step / steps, 1))) / 2.",
    ],
    "warmup": [
        "Two phases. You have the second one already.",
        "In the second phase the cosine has its own step 0.",
        "step / warm if step < warm else cosine_factor(step - warm, steps - warm, final).",
    ],
    "cyclical": [
        "In which cycle is the step, and how far in it?",
        "divmod(step, 2 * rise). Going up, the height is place / rise; going down it is measured from the other end.",
        "lowest + (1 - lowest) * height * (0.5 ** cycle if halve else 1).",
    ],
    "one_cycle": [
        "Two halves of a cosine, one up and one down. Write a helper that goes from a to b.",
        "between(a, b, share) = b + (a - b) * (1 + cos(pi * share)) / 2. Both factor and momentum use it, with the same share.",
        "share = step / top on the way up; (min(step, steps - 1) - top) / (steps - 1 - top) on the way down.",
    ],
    "wsd": [
        "Three phases, each with a step 0 of its own.",
        "Is the step still in the warm-up? On the plateau? How far into the decay? Each phase may be empty.",
        "x = (step - warm - stable) / decay; lowest + (1 - lowest) * (1 - sqrt(x)) while x < 1, then lowest.",
    ],
    "follow": [
        "What must be known to set a rate? The peaks, the factor, and the number of steps done.",
        'Keep the peaks when you are made: [group["lr"] for group in optimizer.param_groups]. A method that sets all rates is used in three places.',
        "__init__: peaks, done = 0, set. step: done += 1, set. load_state_dict: done = state's, set.",
    ],
    "snapshots": [
        "How long is a cycle, if the cycles must fit in all the steps?",
        "ceil(steps / snapshots); the last cycle may be cut short. For the ensemble: which is averaged, logits or probabilities?",
        "[min(k * length, steps) for k = 1, 2, ...]; logits.softmax(-1).mean(0).",
    ],
    "quiz": [
        "Each answer is in the text above one of the exercises.",
        "q1: the paragraph on warm-up. q2: where may a good rate lie? q4: by how much does a step grow with the momentum?",
        "q3: what must a cosine know from the start? q5: where in a cycle is the model at its best?",
    ],
}
