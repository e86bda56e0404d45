"""Planted mistakes of Gradient compression, question by question."""

from dlo_lib.grading.lab.mutant_table import mutant_table

MUTANTS = mutant_table(
    """
[bytes]
fp16 is counted with four bytes
    check_exact_bytes: "fp16" for
    "fp16": 2}  =>  "fp16": 4}
The positions of top-k are free
    check_topk_bytes: the positions travel too
    (4 + 8)  =>  4
The scales of the signs are forgotten
    check_onebit_bytes: a scale of 4 bytes
    return 2 * share * elements / 8 + 2 * (ranks - 1) * 4  =>  return 2 * share * elements / 8
Only the second factor of a low rank is counted
    check_low_rank_bytes: kept × rows and kept × columns
    (rows + columns)  =>  columns
[topk]
The largest elements are taken, not the largest magnitudes
    check_largest: take |x| to choose
    x.abs().topk(k)  =>  x.topk(k)
Of two values at one position, one is lost
    check_sparse_mean, check_sparse_traffic, check_large_sizes: only one of their values counts
    total = values.new_zeros(size).index_add_(0, gathered(positions), gathered(values))  =>
        total = values.new_zeros(size)
        total[gathered(positions)] = gathered(values)
Whole tensors are added by an all-reduce
    check_sparse_traffic: are enough: gather the values and the positions
    total = values.new_zeros(size).index_add_(0, gathered(positions), gathered(values))  =>
        total = values.new_zeros(size).index_add_(0, positions, values)
        dist.all_reduce(total)
Positions are sent in 15 bits
    check_large_sizes: mean 0 on rank
    gathered(positions)  =>  gathered(positions % 32_768)
[feedback]
Only what is left of the last tensor is kept
    check_feedback, check_feedback_objects, check_feedback_resumed: it is (x + e) - sent
    self.error = corrected - sent  =>  self.error = x - sent
The error is added to the argument in place
    check_feedback_argument: after the calls
    corrected = x + self.error  =>  corrected = x.add_(self.error)
The error is changed in place
    check_feedback_argument: what was sent for tensor 0
    corrected = x + self.error  =>
        self.error = corrected = self.error.add_(x) if self.error.dim() else x.clone()
    self.error = corrected - sent  =>  self.error.sub_(sent)
All objects share one error
    check_feedback_objects: each has its own error
    self.error = corrected - sent  =>  ErrorFeedback.error = corrected - sent
    self.error = torch.zeros(())  =>  ErrorFeedback.error = torch.zeros(())
    self.error = state["error"].clone()  =>  ErrorFeedback.error = state["error"].clone()
The state is empty
    check_feedback_resumed: the error is lost
    return {"error": self.error}  =>  return {}
    self.error = state["error"].clone()  =>  pass
[onebit]
The parts that arrived are summed
    check_one_bit_mean, check_one_bit_feedback, check_one_bit_equal, check_one_bit_traffic, check_many_ranks: the mean of tensor 0
    .mean(dim=0)  =>  .sum(dim=0)
The second compression has no error feedback
    check_one_bit_feedback, check_one_bit_equal, check_one_bit_traffic, check_many_ranks: the second compression
    pack(self.of_part(mean))  =>  pack(mean)
A rank uses its own part of the mean without the rounding of the others
    check_one_bit_equal: differ from those of rank 0
    return torch.cat([unpack(*part) for part in parts])  =>
        decoded = [unpack(*part) for part in parts]
        decoded[dist.get_rank()] = decoded[dist.get_rank()].float().to(x.dtype)
        return torch.cat(decoded)
Every rank receives all bits of all ranks, and computes every part
    check_one_bit_traffic: the bits of a part go to its rank only
    answer:
        class OneBitMean:
            def __init__(self):
                self.of_rank, self.of_part = ErrorFeedback(one_bit), {}

            def __call__(self, x):
                world = dist.get_world_size()
                bits, scale = pack(self.of_rank(x))
                parts = zip(gathered(bits).chunk(world), gathered(scale))
                mean = torch.stack([unpack(*part) for part in parts]).mean(dim=0)
                found = []
                for number, part in enumerate(mean.chunk(world)):
                    found.append(self.of_part.setdefault(number, ErrorFeedback(one_bit))(part))
                return torch.cat(found)
More than four ranks are averaged as if there were four
    check_many_ranks: the mean of tensor 0
    .mean(dim=0)  =>  .sum(dim=0) / min(world, 4)
[powersgd]
Q is the sum over the ranks, not the mean
    check_low_rank, check_low_rank_steps, check_low_rank_traffic, check_wide: Q is a mean
    self.q = q / dist.get_world_size()  =>  self.q = q
PowerSGD has no error feedback
    check_low_rank_steps, check_low_rank_traffic, check_wide: M is the gradient plus the error
    self.error = matrix - mean  =>  self.error = torch.zeros(())
Each step begins with the first Q
    check_low_rank_steps, check_low_rank_traffic, check_wide: warm start
    self.q = q / dist.get_world_size()  =>  q /= dist.get_world_size()
    mean = p @ self.q.T  =>  mean = p @ q.T
The matrices are summed, and each rank computes both factors
    check_low_rank_traffic: all-reduce P, then Q
    p = matrix @ self.q  =>
    dist.all_reduce(p)  =>
        total = matrix.clone()
        dist.all_reduce(total)
        p = total @ self.q
    q = matrix.T @ p  =>  q = total.T @ p
    dist.all_reduce(q)  =>
The error is added to the gradient in place
    check_low_rank_arguments: after the calls
    matrix = gradient + self.error  =>  matrix = gradient.add_(self.error)
The first factor is taken for one with as many rows as the gradient
    check_wide: the mean of gradient 0
    p = matrix @ self.q  =>  p = matrix[:, : len(gradient)] @ self.q[: len(gradient)]
[switch]
The norm is compared with the one of the step before
    check_ratio: Compare the last norm with the one
    norms[-1 - distance]  =>  norms[-2]
It answers one step too early, with the wrong norm
    check_enough_steps: norms[-1 - Δ] must exist
    len(norms) <= distance  =>  len(norms) < distance
    norms[-1 - distance]  =>  norms[max(-1 - distance, -len(norms))]
The warm-up of the learning rate is ignored
    check_waits: Before step `warmup` the answer is False
    if len(norms) <= distance or len(norms) < warmup:  =>  if len(norms) <= distance:
[adam]
The rule is asked with the uncorrected variance
    check_adam, check_adam_traffic, check_adam_gradient: take that of the corrected v
    self.norms.append(float(corrected.sum()))  =>  self.norms.append(float(self.variance.sum()))
The rule is asked with the Euclidean norm
    check_adam, check_adam_traffic, check_adam_gradient: the Euclidean norm
    float(corrected.sum())  =>  float(corrected.norm())
The correction of the frozen variance changes with the steps
    check_adam, check_adam_warmup, check_adam_traffic, check_adam_gradient: it is frozen too
    (self.frozen_at or self.steps)  =>  self.steps
The warm-up of the learning rate is not passed to the rule
    check_adam_warmup: x after step
    is_stable(self.norms, self.beta2, self.warmup)  =>  is_stable(self.norms, self.beta2, 0)
The exact mean of the gradients is computed in each step, also where bits are sent
    check_adam_traffic: one all-reduce in each step of the warm-up
    self.steps += 1  =>
        self.steps += 1
        dist.all_reduce(gradient.clone())
The gradient is summed in place
    check_adam_gradient: after the step
    mean = gradient.clone()  =>  mean = gradient
[pays]
Communication is always hidden
    check_step_seconds: if not, their sum
    if scheme["hidden"] else computation + communication  =>  if True else 0.0
[quiz]
Overlap is not the first thing to try
    quiz_q4: overlap costs nothing
    "q4": "d"  =>  "q4": "a"
"""
)
