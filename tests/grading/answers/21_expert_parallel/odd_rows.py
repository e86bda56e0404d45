# Right answers to the experts that select rows in another way.


# == rows_by_a_mask: the rows of an expert are selected by a mask

# %% experts
# - parts = rows.split(counts.tolist())
# - return torch.cat([expert(*each) for each in zip(parts, first, second)])
# + owner = torch.arange(len(counts)).repeat_interleave(counts)
# + return torch.cat([expert(rows[owner == one], first[one], second[one]) for one in range(len(counts))])


# == rows_by_slices: results are written into one tensor, by slices

# %% experts
# - parts = rows.split(counts.tolist())
# - return torch.cat([expert(*each) for each in zip(parts, first, second)])
# + results, start = torch.empty_like(rows), 0
# + for one, count in enumerate(counts.tolist()):
# +     if count:
# +         results[start : start + count] = expert(rows[start : start + count], first[one], second[one])
# +     start += count
# + return results


# == rows_by_places: the rows of an expert are selected by their places

# %% experts
# - parts = rows.split(counts.tolist())
# - return torch.cat([expert(*each) for each in zip(parts, first, second)])
# + ends = counts.cumsum(0).tolist()
# + results = rows.new_zeros(rows.shape)
# + for one, (end, count) in enumerate(zip(ends, counts.tolist())):
# +     places = torch.arange(end - count, end)
# +     results = results.index_add(0, places, expert(rows.index_select(0, places), first[one], second[one]))
# + return results
