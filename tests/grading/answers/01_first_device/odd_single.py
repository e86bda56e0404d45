# Single answers that are right and look unlike the solution.


# == times_by_marks

# %% timed
def step_times(step, synchronize, clock, warmup, repeats):
    times = []
    for number in range(-warmup, repeats):
        if number < 0:
            step()
            continue
        synchronize()
        times.append(-clock())
        step()
        synchronize()
        times[-1] += clock()
    return times


# == limits_by_powers_of_two


# %% limits
def limits(exponent_bits, mantissa_bits):
    import math

    top = 2 ** (exponent_bits - 1) - 1
    return dict(
        eps=math.ldexp(1.0, -mantissa_bits),
        smallest=math.ldexp(1.0, 1 - top - mantissa_bits),
        smallest_normal=math.ldexp(1.0, 1 - top),
        largest=math.ldexp(1.0, top) + math.ldexp(1.0 - math.ldexp(1.0, 1 - mantissa_bits) / 2, top),
    )


# == strides_from_the_order_of_the_axes


# %% strides
def strides(shape, channels_last):
    order = (0, 2, 3, 1) if channels_last else (0, 1, 2, 3)
    found, step = [0] * 4, 1
    for axis in reversed(order):
        found[axis], step = step, step * shape[axis]
    return tuple(found)


# == bisect_with_a_growing_step


# %% search
def fits(run, batch):
    import contextlib

    ended = []
    with contextlib.suppress(torch.OutOfMemoryError):
        run(batch)
        ended.append(batch)
    return bool(ended)


def largest_batch(fits, limit):
    best, step = 0, 1
    while best < limit and fits(min(best + step, limit)):
        best, step = min(best + step, limit), 2 * step
    step = min(step, limit - best)
    while step > 1:
        step = -(-step // 2)
        if best + step <= limit and step and fits(best + step):
            best += step
    return best
