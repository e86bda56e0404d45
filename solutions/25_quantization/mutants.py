"""Planted mistakes of quantization, question by question."""

from dlo_lib.grading.lab.mutant_table import mutant_table

MUTANTS = mutant_table("""
    [grid]
    The largest integer is a power of two
        check_absmax: the largest integer is 2^(b-1) - 1
        largest / most  =>  largest / (most + 1)
    The scale is that of the largest number
        check_absmax: the scale belongs to the largest absolute value
        largest = x.abs().max()  =>  largest = x.max()
    The zero-point is that of unsigned integers
        check_zero_point, check_range, check_one_sided: the zero-point is
        zero = least - torch.round(low / scale)  =>  zero = -torch.round(low / scale)
    Zero may be outside of the range
        check_range, check_one_sided: the range must contain 0
        low, high = x.min().clamp(max=0), x.max().clamp(min=0)  =>  low, high = x.min(), x.max()
    Zeros are divided by zero
        check_constant: the scale
        largest / most if largest > 0 else torch.ones_like(largest)  =>  largest / most

    [store]
    A row has one scale
        check_groups, check_load, check_one_row: these are the scales of whole rows
        scale = parts.abs().amax(2) / most  =>  scale = (parts.abs().amax((1, 2), keepdim=True)[:, :, 0] / most).expand(-1, parts.shape[1])
    A group of zeros has the scale 0
        check_groups: the scales of groups
        torch.where(scale > 0, scale, torch.ones_like(scale))  =>  scale + 0
    An integer takes a byte
        check_bytes: store two of them in each byte
        return nibbles[:, ::2] | (nibbles[:, 1::2] << 4), scale.half()  =>  return nibbles, scale.half()
        nibbles = torch.stack([packed & 15, packed >> 4], 2).flatten(1).to(torch.int8)  =>  nibbles = packed.to(torch.int8)
    The scales take four bytes
        check_bytes: are enough
        scale.half()  =>  scale.float()
    The sign is lost
        check_load, check_one_row: all wrong weights are negative
        torch.where(nibbles > 7, nibbles - 16, nibbles)  =>  nibbles
    The halves of a byte are exchanged
        check_load, check_one_row: come back with an error above half a step
        [packed & 15, packed >> 4]  =>  [packed >> 4, packed & 15]

    [calibrate]
    Only the last batch counts
        check_min_max, check_percentile: this is the range of the last batch
        torch.cat([batch.flatten() for batch in batches])  =>  batches[-1].flatten()
    Percentiles of batches are averaged
        check_percentile: the mean of the percentiles of the batches
        low, high = torch.quantile(every, torch.tensor([1 - p / 100, p / 100], dtype=every.dtype))  =>
            parts = torch.tensor([1 - p / 100, p / 100], dtype=every.dtype)
            each = torch.stack([torch.quantile(batch.flatten(), parts) for batch in batches])
            low, high = (every.min(), every.max()) if p == 100 else each.mean(0)
    The percentile is ignored
        check_percentile, check_one_batch: p is not used
        torch.tensor([1 - p / 100, p / 100], dtype=every.dtype)  =>  torch.tensor([0.0, 1.0], dtype=every.dtype)

    [product]
    Sums are made in float32
        check_exact, check_both_signs: int32 is exact, float32 is not
        return qx.to(torch.int32) @ wide.t() + folded  =>  return (qx.float() @ qw.float().t()).to(torch.int32) + folded
    The zero-point is subtracted in int8
        check_zero, check_both_signs, check_clamped: does not fit in int8
        folded = bias - zero * wide.sum(1, dtype=torch.int32)  =>  folded = bias
        qx.to(torch.int32) @  =>  (qx - torch.tensor(zero).to(torch.int8)).to(torch.int32) @
    The zero-point is forgotten
        check_zero, check_both_signs, check_static, check_clamped: the zero-point is missing
        folded = bias - zero * wide.sum(1, dtype=torch.int32)  =>  folded = bias
    The bias stays in floating point
        check_static, check_clamped: the bias is not rounded to its grid
        return scale * accumulate(qx, zero, qw, torch.round(bias / scale).to(torch.int32))  =>  return scale * accumulate(qx, zero, qw, torch.zeros_like(bias).to(torch.int32)) + bias
    The bias is truncated
        check_static, check_clamped: the bias is truncated, not rounded
        torch.round(bias / scale).to(torch.int32)  =>  (bias / scale).to(torch.int32)
    The integers wrap around
        check_clamped: it wraps around
        .clamp(-128, 127).to(torch.int8)  =>  .to(torch.int32).to(torch.int8)
    Nothing is clamped
        check_clamped: are not clamped
        qx = (torch.round(x / scale_x) + zero).clamp(-128, 127).to(torch.int8)  =>  steps = torch.round(x / scale_x) + zero
        return scale * accumulate(qx, zero, qw, torch.round(bias / scale).to(torch.int32))  =>  return scale * ((steps - zero) @ qw.to(x.dtype).t() + torch.round(bias / scale))

    [outliers]
    Negative outliers are not found
        check_columns: a large negative number is an outlier too
        return (x.abs() >= threshold).any(0)  =>  return (x >= threshold).any(0)
    The threshold itself is no outlier
        check_columns: a value equal to the threshold is an outlier too
        return (x.abs() >= threshold).any(0)  =>  return (x.abs() > threshold).any(0)
    A column is an outlier if all tokens are
        check_columns: one token above the threshold
        return (x.abs() >= threshold).any(0)  =>  return (x.abs() >= threshold).all(0)
    A grid of w covers the outlier columns
        check_decomposition, check_one_token: take its largest value from the rest
        qw, scale_w = quantize_groups(w[:, ~out], 8, int((~out).sum()))  =>
            qw, scale_w = quantize_groups(w, 8, w.shape[1])
            qw = qw[:, ~out]
    A grid of x covers the outlier columns
        check_decomposition, check_one_token: the largest values are those of the rest
        qx, scale_x = quantize_groups(x[:, ~out], 8, int((~out).sum()))  =>
            qx, scale_x = quantize_groups(x, 8, x.shape[1])
            qx = qx[:, ~out]
    Nothing is taken out
        check_decomposition, check_one_token, check_all_outliers: the outliers are rounded with the rest
        out[outlier_columns(x, threshold)] = True  =>  outlier_columns(x, threshold)
    Without an outlier nothing is rounded
        check_no_outliers: nothing is rounded
        if out.all():  =>
            if not out.any():
                return x @ w.t()
            if out.all():
    Only outliers are no case
        check_all_outliers: RuntimeError
        if out.all():  =>  if False:

    [smooth]
    The norm is multiplied
        check_factors, check_two_matrices, check_equal, check_dead: the norm is divided by s
        gain / s  =>  gain * s
    Only the first matrix counts
        check_factors, check_two_matrices, check_dead: take the largest weight of all of them
        torch.cat(weights).abs()  =>  weights[0].abs()
    The exponent is always a half
        check_factors, check_two_matrices, check_dead: the exponent is not used
        largest.clamp(min=1e-5) ** a / of_weights ** (1 - a)  =>  (largest.clamp(min=1e-5) / of_weights) ** 0.5
    The exponents are exchanged
        check_factors, check_two_matrices, check_dead: the exponents are exchanged
        ** a / of_weights ** (1 - a)  =>  ** (1 - a) / of_weights ** a
    The last weight is not scaled
        check_equal: the product with the new gain
        [w * s for w in weights]  =>  [*(w * s for w in weights[:-1]), weights[-1]]
    Channels of zeros give infinity
        check_dead: raise both maxima to 1e-5
        .abs().amax(0).clamp(min=1e-5)  =>  .abs().amax(0)

    [awq]
    The error of the weights is compared
        check_exponent, check_other_layer, check_scales, check_unseen: the error of the output is
        (x @ (rounded - w).t()).square()  =>  (rounded - w).square()
    The exponent 1 is not tried
        check_exponent: times that with 1.000
        range(steps + 1)  =>  range(steps)
    The largest activations are taken
        check_scales: the mean is asked for
        return mean**best, best  =>  return x.abs().amax(0) ** best, best
    The second best exponent is taken
        check_exponent, check_other_layer: the error of the output is
        best = found.index(min(found)) / steps  =>  best = found.index(sorted(found)[1]) / steps
    The factors are returned as they divide
        check_unseen, check_scales: times that of plain rounding
        return mean**best, best  =>  return mean**-best, best

    [gptq]
    Nothing is compensated
        check_compensated, check_better: nothing is compensated
        left[:, j:] -= error * u[j, j:]  =>  left[:, j:] -= 0 * error
    The damping is ignored
        check_compensated: the damping is not used
        damping * h.diagonal()  =>  1e-12 * h.diagonal()
    The damping is added as it is
        check_compensated: damping is a part of the mean of the diagonal
        damping * h.diagonal().mean() *  =>  damping *
    The factor is that of H
        check_compensated, check_better: U is a factor of H
        torch.linalg.cholesky(torch.linalg.inv(h), upper=True)  =>  torch.linalg.cholesky(h, upper=True)
    The inverse is no factor
        check_compensated: the inverse of H is used instead of its factor
        torch.linalg.cholesky(torch.linalg.inv(h), upper=True)  =>  torch.linalg.inv(h)
    The matrix has one scale
        check_compensated, check_better: before any correction
        return q, scale  =>  return q, scale.amax().expand(len(w), 1).clone()
    The error is added
        check_better, check_compensated: times that of plain rounding
        left[:, j:] -= error * u[j, j:]  =>  left[:, j:] += error * u[j, j:]

    [qat]
    One bit of more than two is not used
        check_rounded: fake_quantize
        quantize_groups(w.detach(), bits, w.shape[1])  =>  quantize_groups(w.detach(), max(2, bits - 1), w.shape[1])
    Each row has a ternary scale
        check_ternary, check_training: ternary(w)
        g = w.detach().abs().mean()  =>  g = w.detach().abs().mean(1, keepdim=True)
    No gradient passes
        check_gradient, check_training: no gradient reaches w
        return w + (q * scale - w).detach()  =>  return (q * scale).detach()
    A gradient flows through the scale
        check_gradient: a gradient also flows through the scale
        q, scale = quantize_groups(w.detach(), bits, w.shape[1])  =>
            scale = quantize_groups(w, bits, w.shape[1])[1]
            y = w / scale
        return w + (q * scale - w).detach()  =>  return (y + (y.round() - y).detach()) * scale
    The gradient has the wrong sign
        check_training, check_gradient: the loss is
        return w + (q * scale - w).detach()  =>  return 2 * (q * scale).detach() - (w + (q * scale - w).detach())

    [quiz]
    A zero-point gains nothing
        quiz_q1: half of the integers
        "q1": "b"  =>  "q1": "a"
    The scales are free
        quiz_q2: a scale of 2 bytes
        "q2": "d"  =>  "q2": "a"
    Outliers overflow
        quiz_q3: the grid of a token
        "q3": "a"  =>  "q3": "b"
    Tensor cores decide
        quiz_q4: reads each weight once
        "q4": "c"  =>  "q4": "a"
""")
