"""Planted mistakes of The profiler, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- spans
    Mutant(
        "The event of the profiler itself is a span",
        "check_complete",
        says="leave out the category",
        replace={'skipped = ("Trace", "gpu_user_annotation")': 'skipped = ("gpu_user_annotation",)'},
        also=["check_milliseconds", "check_order"],
    ),
    Mutant(
        "The copies of the regions on a GPU are spans",
        "check_complete",
        says="on the track of a GPU",
        replace={'skipped = ("Trace", "gpu_user_annotation")': 'skipped = ("Trace",)'},
        also=["check_milliseconds", "check_order"],
    ),
    Mutant(
        "Only the spans of the first track are read",
        "check_complete",
        says="one for each event of the kind X",
        replace={
            "first = min(": """
            events = [event for event in events if event["tid"] == events[0]["tid"]]
            first = min("""
        },
        also=["check_milliseconds", "check_order"],
    ),
    Mutant(
        "The times stay in microseconds",
        "check_milliseconds",
        says="The times are microseconds",
        replace={
            'begin = (event["ts"] - first) / 1000': 'begin = event["ts"] - first',
            'begin + event["dur"] / 1000': 'begin + event["dur"]',
        },
    ),
    Mutant(
        "The times are not shifted to the first span",
        "check_milliseconds",
        says="the earliest span begins at",
        replace={'(event["ts"] - first) / 1000': 'event["ts"] / 1000'},
    ),
    Mutant(
        "The clock begins at the event of the profiler",
        "check_milliseconds",
        says="begin at the event of the profiler",
        replace={
            'min((event["ts"] for event in events), default=0)': 'min(event["ts"] for event in trace["traceEvents"] if event["ph"] == "X")'
        },
    ),
    Mutant(
        "The end is the duration",
        "check_milliseconds",
        says="`end` is the duration",
        replace={'"end": begin + event["dur"] / 1000': '"end": event["dur"] / 1000'},
    ),
    Mutant(
        "The spans keep the order of the file",
        "check_order",
        says="not sorted by `begin`",
        replace={'return sorted(found, key=lambda span: (span["begin"], -span["end"]))': "return found"},
    ),
    Mutant(
        "Of spans that begin together, the shorter one is first",
        "check_order",
        says="the shorter one is first",
        replace={'(span["begin"], -span["end"])': '(span["begin"], span["end"])'},
    ),
    # -- nesting
    Mutant(
        "The parent is the outermost span",
        "check_parents",
        says="but not directly",
        replace={"found.append(stack[-1] if stack else None)": "found.append(stack[0] if stack else None)"},
        also=["check_one_pass", "check_tracks", "check_self", "check_deep"],
    ),
    Mutant(
        "A span that begins at the end of another one is within it",
        "check_parents",
        says="close the spans that end at its begin",
        replace={'spans[stack[-1]]["end"] <= span["begin"]': 'spans[stack[-1]]["end"] < span["begin"]'},
        also=["check_one_pass", "check_tracks", "check_self", "check_deep"],
    ),
    Mutant(
        "A loop over all pairs",
        "check_one_pass",
        says="no answer in time",
        replace={
            """
            found, stacks = [], {}
            for number, span in enumerate(spans):
                stack = stacks.setdefault(span["track"], [])
                while stack and spans[stack[-1]]["end"] <= span["begin"]:
                    stack.pop()
                found.append(stack[-1] if stack else None)
                stack.append(number)
            return found
            """: """
            found = []
            for number, span in enumerate(spans):
                around = [n for n in range(number) if spans[n]["track"] == span["track"] and spans[n]["end"] >= span["end"]]
                found.append(around[-1] if around else None)
            return found
            """
        },
    ),
    Mutant(
        "One stack for all tracks",
        "check_tracks",
        says="each has a separate stack",
        replace={'stacks.setdefault(span["track"], [])': 'stacks.setdefault("all", [])'},
        also=["check_self"],
    ),
    Mutant(
        "The self time is the duration",
        "check_self",
        says="These are the durations",
        replace={'own[parent] -= span["end"] - span["begin"]': "pass"},
        also=["check_deep"],
    ),
    Mutant(
        "A span is subtracted from all spans around it",
        "check_self",
        says="subtract it only from the one that directly contains it",
        replace={
            """
            if parent is not None:
                own[parent] -= span["end"] - span["begin"]
            """: """
            above = parents(spans)
            while parent is not None:
                own[parent] -= span["end"] - span["begin"]
                parent = above[parent]
            """
        },
        also=["check_deep"],
    ),
    Mutant(
        "One span at most is closed before the next one begins",
        "check_parents",
        says="pop while the top has ended",
        replace={'while stack and spans[stack[-1]]["end"]': 'if stack and spans[stack[-1]]["end"]'},
        also=["check_one_pass", "check_tracks", "check_self"],
    ),
    Mutant(
        "Nothing is subtracted from the first span",
        "check_self",
        says="takes 0 for false",
        replace={
            """
            if parent is not None:
                own[parent] -= span["end"] - span["begin"]
            """: """
            if parent:
                own[parent] -= span["end"] - span["begin"]
            """
        },
        also=["check_deep"],
    ),
    # -- phases
    Mutant(
        "The sums of all steps",
        "check_phase_times",
        says="These are the sums of all steps",
        replace={
            "{name: value / len(steps) for name, value in sums.items()}": '{name: value / (len(steps) if name == "other" else 1) for name, value in sums.items()}'
        },
        also=["check_outside"],
    ),
    Mutant(
        "The last occurrence of a phase counts",
        "check_phase_times",
        says="Only the last occurrence of a phase counts",
        replace={
            'sums[span["name"]] += span["end"] - span["begin"]': """
            sums[span["name"]] = span["end"] - span["begin"]
            """
        },
        also=["check_outside", "check_other"],
    ),
    Mutant(
        "The mean of the occurrences, not of the steps",
        "check_phase_times",
        says="divided by the number of occurrences",
        replace={
            "return {name: value / len(steps) for name, value in sums.items()}": """
            times = {name: sum(span["name"] == name and any(step["track"] == span["track"] and step["begin"] <= span["begin"] < step["end"] for step in steps) for span in spans) for name in phases}
            return {name: value / (times.get(name) or len(steps)) for name, value in sums.items()}
            """
        },
        also=["check_outside"],
    ),
    Mutant(
        "Phases before the steps count",
        "check_outside",
        says="A phase outside of the steps is counted",
        replace={
            'step["track"] == span["track"] and step["begin"] <= span["begin"] < step["end"]': 'step["track"] == span["track"]'
        },
    ),
    Mutant(
        "Phases between the steps count",
        "check_outside",
        says="A phase between two steps is counted",
        replace={
            'step["track"] == span["track"] and step["begin"] <= span["begin"] < step["end"] for step in steps': 'step["track"] == span["track"] and steps[0]["begin"] <= span["begin"] < steps[-1]["end"] for step in steps'
        },
    ),
    Mutant(
        "Phases of other threads count",
        "check_outside",
        says="A phase on another track is counted",
        replace={'step["track"] == span["track"] and ': ""},
    ),
    Mutant(
        "The rest is the gaps between the steps",
        "check_other",
        says="add up to the mean duration of a step",
        replace={
            'total = sum(step["end"] - step["begin"] for step in steps)': 'total = steps[-1]["end"] - steps[0]["begin"]'
        },
    ),
    # -- kinds
    Mutant(
        "The sums of all steps, of each kind",
        "check_kinds",
        says="These are the sums of all steps",
        replace={"{kind: total / steps for kind, total in sums.items()}": "dict(sums)"},
        also=["check_inherited", "check_kinds_outside", "check_all_kinds"],
    ),
    Mutant(
        "Each span has the kind that its name says",
        "check_inherited",
        says="ask first for the kind of its parent",
        replace={
            'elif above in (None, "conversion", "read"):': "elif above is None:",
        },
        also=["check_all_kinds"],
    ),
    Mutant(
        "Spans outside of the steps count",
        "check_kinds_outside",
        says="a span counts if a step is around it",
        replace={'elif above in (None, "conversion", "read"):': 'elif above in ("conversion", "read"):'},
        also=["check_all_kinds"],
    ),
    Mutant(
        "The durations of each kind",
        "check_kinds",
        says="the time of a span is its self time",
        question="kinds",
        replace={
            "parents(spans), self_times(spans)):": 'parents(spans), [span["end"] - span["begin"] for span in spans]):'
        },
        also=["check_inherited", "check_kinds_outside", "check_all_kinds"],
    ),
    Mutant(
        "Operators pass their kind on, too",
        "check_inherited",
        says="only conversions and reads pass their kind on",
        replace={
            'elif above in (None, "conversion", "read"):': 'elif above in (None, "conversion", "read", "operator"):'
        },
        also=["check_all_kinds"],
    ),
    Mutant(
        "A kind is passed on by the parent's name only",
        "check_inherited",
        says="what that calls belongs to it, too",
        replace={
            """
            elif above in (None, "conversion", "read"):
                kind = above
            """: """
            elif above is None:
                kind = None
            elif spans[parent]["name"] in kinds:
                kind = kinds[spans[parent]["name"]]
            """
        },
        also=["check_all_kinds"],
    ),
    # -- amdahl
    Mutant(
        "Only the parts that become faster remain",
        "check_divided",
        says="they stay as they are",
        replace={
            "return sum(value / faster.get(name, 1) for name, value in times.items())": """
            if not faster or math.inf in faster.values():
                return sum(value / faster.get(name, 1) for name, value in times.items())
            return sum(times[name] / factor for name, factor in faster.items())
            """
        },
    ),
    Mutant(
        "The times are multiplied by the factors",
        "check_divided",
        says="takes half of the time",
        replace={
            "value / faster.get(name, 1)": "(0 if faster.get(name, 1) == math.inf else value * faster.get(name, 1))"
        },
    ),
    Mutant(
        "The whole step is divided by the factors",
        "check_divided",
        says="only their parts shrink",
        replace={
            "return sum(value / faster.get(name, 1) for name, value in times.items())": """
            if math.inf in faster.values():
                return sum(value / faster.get(name, 1) for name, value in times.items())
            return sum(times.values()) / math.prod(faster.values())
            """
        },
    ),
    Mutant(
        "An infinite factor changes nothing",
        "check_removed",
        says="the step without",
        replace={
            "value / faster.get(name, 1)": "value / (1 if math.isinf(faster.get(name, 1)) else faster.get(name, 1))"
        },
    ),
    Mutant(
        "The times that are given are changed",
        "check_divided",
        says="has changed the dict `times`",
        replace={
            "return sum(value / faster.get(name, 1) for name, value in times.items())": """
            for name, factor in faster.items():
                times[name] /= factor
            return sum(times.values())
            """
        },
    ),
    # -- batches
    Mutant(
        "The images are not standardised",
        "check_same_batches",
        says="The images are not standardised",
        replace={"(images - images.mean(0)) / images.std(0)": "images"},
        also=["check_once", "check_own_images", "check_given"],
    ),
    Mutant(
        "The statistics are those of the batch",
        "check_same_batches",
        says="with the statistics of their batch",
        replace={
            "(images - images.mean(0)) / images.std(0)": "images",
            "yield self.images[chosen], self.labels[chosen]": """
            own = self.images[chosen]
            yield (own - own.mean(0)) / own.std(0), self.labels[chosen]
            """,
        },
        also=["check_once", "check_own_images"],
    ),
    Mutant(
        "Each epoch has another order",
        "check_same_batches",
        says="of epoch 2",
        replace={
            "for chosen in order.split(self.size):": """
            self.seed += 1
            for chosen in order.split(self.size):
            """
        },
    ),
    Mutant(
        "The images are standardised at the start of each epoch",
        "check_once",
        says="computed when the iteration runs",
        replace={
            "self.images = (images - images.mean(0)) / images.std(0)": "self.raw = self.images = images",
            "for chosen in order.split(self.size):": """
            self.images = (self.raw - self.raw.mean(0)) / self.raw.std(0)
            for chosen in order.split(self.size):
            """,
        },
        also=["check_own_images"],
    ),
    Mutant(
        "The statistics are kept, and all images are standardised in each epoch",
        "check_own_images",
        says="again in each epoch",
        replace={
            "self.images = (images - images.mean(0)) / images.std(0)": "self.raw = self.images = images; self.mean, self.std = images.mean(0), images.std(0)",
            "for chosen in order.split(self.size):": """
            self.images = (self.raw - self.mean) / self.std
            for chosen in order.split(self.size):
            """,
        },
    ),
    Mutant(
        "One mean and one standard deviation for all numbers",
        "check_same_batches",
        says="each position has its own",
        replace={"(images - images.mean(0)) / images.std(0)": "(images - images.mean()) / images.std()"},
        also=["check_once", "check_own_images"],
    ),
    Mutant(
        "The generator continues in the next epoch",
        "check_same_batches",
        says="make the generator, with its seed, in __iter__",
        replace={
            "self.labels, self.size, self.seed = labels, size, seed": "self.labels, self.size, self.generator = labels, size, torch.Generator().manual_seed(seed)",
            "torch.Generator().manual_seed(self.seed)": "self.generator",
        },
    ),
    Mutant(
        "The statistics are kept, and all images are standardised for each batch",
        "check_own_images",
        says="those of all images, for one batch",
        replace={
            "self.images = (images - images.mean(0)) / images.std(0)": "self.images, self.mean, self.std = images, images.mean(0), images.std(0)",
            "yield self.images[chosen], self.labels[chosen]": "yield ((self.images - self.mean) / self.std)[chosen], self.labels[chosen]",
        },
    ),
    Mutant(
        "The images are standardised in place",
        "check_given",
        says="work in place",
        replace={
            "self.images = (images - images.mean(0)) / images.std(0)": "self.images = images.sub_(images.mean(0)).div_(images.std(0))"
        },
    ),
    # -- block
    Mutant(
        "The inputs are not scaled",
        "check_same_block",
        says="multiply them by the gain",
        replace={"self.linear(x * self.gain)": "self.linear(x)"},
        also=["check_float32"],
    ),
    Mutant(
        "The gain is applied without a gradient",
        "check_same_block",
        says="the gradient of its input",
        replace={"self.linear(x * self.gain)": "self.linear(x.detach() * self.gain + 0 * x)"},
    ),
    Mutant(
        "The gain is converted in each forward",
        "check_float32",
        says="forward converts",
        replace={
            "torch.from_numpy(gain).float()": "torch.from_numpy(gain)",
            "self.linear(x * self.gain)": "self.linear(x * self.gain.float())",
        },
        also=["check_buffer"],
    ),
    Mutant(
        "The weights are float64",
        "check_float32",
        says="forward converts",
        replace={
            "self.linear(x * self.gain)": "F.linear(x.double() * self.gain, self.linear.weight.double(), self.linear.bias.double()).float()"
        },
    ),
    Mutant(
        "The product with the gain is float64",
        "check_float32",
        says="computes in float64",
        replace={
            'self.register_buffer("gain", torch.from_numpy(gain).float())': """
            self.register_buffer("gain", torch.from_numpy(gain).float())
            self.precise = torch.from_numpy(gain)
            """,
            "self.linear(x * self.gain)": "self.linear(torch.empty_like(x).copy_(x * self.precise))",
        },
    ),
    Mutant(
        "Conversions that convert nothing are kept",
        "check_float32",
        says="has nothing to convert",
        replace={
            "self.linear(x * self.gain)": "(lambda x: F.linear(x, self.linear.weight.to(x.dtype), self.linear.bias.to(x.dtype)).float())(x * self.gain)"
        },
    ),
    Mutant(
        "The weights follow the dtype of the input",
        "check_float32",
        says="accepts an input in float64",
        replace={
            "self.linear(x * self.gain)": "F.linear(x * self.gain, self.linear.weight.to(x.dtype), self.linear.bias.to(x.dtype))"
        },
    ),
    Mutant(
        "The gain is an attribute",
        "check_buffer",
        says="stays on the CPU when the model moves",
        replace={
            'self.register_buffer("gain", torch.from_numpy(gain).float())': "self.gain = torch.from_numpy(gain).float()"
        },
    ),
    Mutant(
        "The gain is not saved",
        "check_buffer",
        says="is not saved with the model",
        replace={"torch.from_numpy(gain).float())": "torch.from_numpy(gain).float(), persistent=False)"},
    ),
    # -- accuracy
    Mutant(
        "Only the last batch is counted",
        "check_counts",
        says="Only the last batch is counted",
        replace={
            "self.counted.index_add_(1,": """
            self.counted.zero_()
            self.counted.index_add_(1,"""
        },
        also=["check_no_reads", "check_single"],
    ),
    Mutant(
        "The rows are exchanged",
        "check_counts",
        says="The two rows are exchanged",
        replace={
            "torch.stack([right.long(), torch.ones_like(labels)])": "torch.stack([torch.ones_like(labels), right.long()])"
        },
        also=["check_no_loop", "check_no_reads", "check_single"],
    ),
    Mutant(
        "The images are counted under the predicted class",
        "check_counts",
        says="count them under their label",
        replace={"index_add_(1, labels,": "index_add_(1, logits.argmax(1),"},
        also=["check_no_loop", "check_no_reads", "check_single"],
    ),
    Mutant(
        "A label counts once in a batch",
        "check_counts",
        says="writes each place once",
        replace={
            "self.counted.index_add_(1, labels, torch.stack([right.long(), torch.ones_like(labels)]))": """
            once = torch.zeros_like(self.counted)
            once[1, labels] = 1
            once[0] = torch.zeros_like(once[0]).index_add_(0, labels, right.long()).clamp(max=1)
            self.counted += once
            """
        },
        also=["check_no_loop", "check_no_reads"],
    ),
    Mutant(
        "The last image of each label counts",
        "check_counts",
        says="keeps the last value of each place",
        replace={
            "self.counted.index_add_(1, labels, torch.stack([right.long(), torch.ones_like(labels)]))": """
            self.counted[0, labels] += right.long()
            self.counted[1, labels] += 1
            """
        },
        also=["check_no_loop", "check_no_reads"],
    ),
    Mutant(
        "A loop over the images, without a read",
        "check_no_loop",
        says="it loops over the images",
        replace={
            "self.counted.index_add_(1, labels, torch.stack([right.long(), torch.ones_like(labels)]))": """
            for place in range(len(labels)):
                one = labels[place : place + 1]
                self.counted.index_add_(1, one, torch.stack([right[place : place + 1].long(), torch.ones_like(one)]))
            """
        },
    ),
    Mutant(
        "The loop of the slow program",
        "check_no_loop",
        says="it loops over the images",
        replace={
            "self.counted.index_add_(1, labels, torch.stack([right.long(), torch.ones_like(labels)]))": """
            for row, label in enumerate(labels):
                self.counted[1, label.item()] += 1
                self.counted[0, label.item()] += right[row].long()
            """
        },
        also=["check_no_reads"],
    ),
    Mutant(
        "Reads whether any image is right",
        "check_no_reads",
        says="each read waits for all work",
        replace={
            "self.counted.index_add_(1, labels, torch.stack([right.long(), torch.ones_like(labels)]))": """
            self.counted.index_add_(1, labels, torch.stack([torch.zeros_like(labels), torch.ones_like(labels)]))
            if right.any():
                self.counted.index_add_(1, labels, torch.stack([right.long(), torch.zeros_like(labels)]))
            """
        },
    ),
    Mutant(
        "The images that are right are picked by a mask",
        "check_no_reads",
        says="The size of the result of x[mask]",
        replace={
            "self.counted.index_add_(1, labels, torch.stack([right.long(), torch.ones_like(labels)]))": """
            self.counted[0].index_add_(0, labels[right], torch.ones_like(labels[right]))
            self.counted[1].index_add_(0, labels, torch.ones_like(labels))
            """
        },
    ),
    Mutant(
        "bincount",
        "check_no_reads",
        says="The size of the result of bincount",
        replace={
            "self.counted.index_add_(1, labels, torch.stack([right.long(), torch.ones_like(labels)]))": """
            classes = self.counted.shape[1]
            self.counted[0] += labels.bincount(right.double(), minlength=classes).long()
            self.counted[1] += labels.bincount(minlength=classes)
            """
        },
    ),
    Mutant(
        "The counts are made in NumPy",
        "check_no_reads",
        says="do not come from operations on the logits",
        replace={
            "self.counted.index_add_(1, labels, torch.stack([right.long(), torch.ones_like(labels)]))": """
            classes = self.counted.shape[1]
            found = [np.bincount(labels.numpy(), right.numpy(), minlength=classes), np.bincount(labels.numpy(), minlength=classes)]
            self.counted += torch.from_numpy(np.stack(found).astype(np.int64))
            """
        },
    ),
    Mutant(
        "The counts are on the CPU",
        "check_device",
        says="for torch.device('meta')",
        replace={", dtype=torch.int64, device=device)": ", dtype=torch.int64)"},
    ),
    # -- overlap
    Mutant(
        "The lengths are added",
        "check_covered",
        says="the time counts once",
        replace={"total += max(0.0, end - max(begin, reached))": "total += end - begin"},
        also=["check_overlap", "check_overlap_edges"],
    ),
    Mutant(
        "The gaps are covered",
        "check_covered",
        says="the gaps do not count",
        replace={"end - max(begin, reached)": "end - (begin if reached == -math.inf else reached)"},
        also=["check_overlap"],
    ),
    Mutant(
        "The end moves back",
        "check_covered",
        says="keep the larger end",
        replace={"reached = max(reached, end)": "reached = end"},
        also=["check_overlap"],
    ),
    Mutant(
        "The intervals are not sorted",
        "check_covered",
        says="sort them by their begin first",
        replace={"in sorted(intervals):": "in intervals:"},
        also=["check_overlap"],
    ),
    Mutant(
        "The last run is forgotten",
        "check_covered",
        says="add it after the loop",
        replace={
            """
            for begin, end in sorted(intervals):
                total += max(0.0, end - max(begin, reached))
                reached = max(reached, end)
            """: """
            first = -math.inf
            for begin, end in sorted(intervals):
                if begin > reached:
                    total += reached - first if reached > first else 0.0
                    first = begin
                reached = max(reached, end)
            """
        },
        also=["check_overlap"],
    ),
    Mutant(
        "A list that is given is changed",
        "check_overlap",
        says="works in place",
        replace={
            "return covered(a) + covered(b) - covered([*a, *b])": """
            lengths = covered(a) + covered(b)
            a += b
            return lengths - covered(a)
            """
        },
    ),
    Mutant(
        "The overlaps of all pairs",
        "check_overlap",
        says="The overlaps of all pairs are added",
        replace={
            "return covered(a) + covered(b) - covered([*a, *b])": "return float(sum(max(0.0, min(one[1], two[1]) - max(one[0], two[0])) for one in a for two in b))"
        },
        also=["check_overlap_edges"],
    ),
    Mutant(
        "The union instead of the overlap",
        "check_overlap",
        says="This is the union of both",
        replace={"return covered(a) + covered(b) - covered([*a, *b])": "return covered([*a, *b])"},
        also=["check_overlap_edges"],
    ),
    # -- flops
    Mutant(
        "The forward alone",
        "check_flops",
        says="This is the forward alone",
        replace={"3 * sum(layers) - layers[0]": "sum(layers)"},
        also=["check_single_layer"],
    ),
    Mutant(
        "The first layer has three products",
        "check_flops",
        says="The first layer needs no gradient of its input",
        replace={"3 * sum(layers) - layers[0]": "3 * sum(layers)"},
        also=["check_single_layer"],
    ),
    Mutant(
        "A product takes m·k·n FLOPs",
        "check_flops",
        says="are two FLOPs",
        replace={"2 * batch * inputs * outputs": "batch * inputs * outputs"},
        also=["check_single_layer"],
    ),
    Mutant(
        "The inverse of the MFU",
        "check_mfu",
        says="This is the inverse",
        replace={"flops / seconds / peak": "peak * seconds / flops"},
    ),
    Mutant(
        "The rate instead of the share",
        "check_mfu",
        says="This is the rate in FLOP/s",
        replace={"flops / seconds / peak": "flops / seconds"},
    ),
    Mutant(
        "The batch is forgotten",
        "check_flops",
        says="a row for each image",
        replace={"2 * batch * inputs * outputs": "2 * inputs * outputs"},
        also=["check_single_layer"],
    ),
    Mutant(
        "The FLOPs are multiplied by the seconds",
        "check_mfu",
        says="FLOPs divided by seconds",
        replace={"flops / seconds / peak": "flops * seconds / peak"},
    ),
    # -- roofline
    Mutant(
        "Bytes per FLOP",
        "check_memory_bound",
        says="not bytes per FLOP",
        replace={
            "min(peak, flops / nbytes * bandwidth)": "min(peak, (flops / nbytes if flops / nbytes * bandwidth > peak else nbytes / flops) * bandwidth)"
        },
    ),
    Mutant(
        "Always the peak",
        "check_memory_bound",
        says="memory cannot deliver fast enough",
        replace={"min(peak, flops / nbytes * bandwidth)": "peak"},
    ),
    Mutant(
        "Without the peak",
        "check_peak",
        says="This is more than the peak",
        replace={"min(peak, flops / nbytes * bandwidth)": "flops / nbytes * bandwidth"},
    ),
    # -- diagnose
    Mutant(
        "Always the same cause",
        "check_alone",
        says="is called",
        replace={'return most if sums.get(most, 0.0) >= total / 5 else "healthy"': 'return "float64"'},
        also=["check_most_time", "check_healthy"],
    ),
    Mutant(
        "The cause with most spans",
        "check_most_time",
        says="not numbers of spans",
        replace={
            "sums[cause] = sums.get(cause, 0.0) + own": """
            sums[cause] = sums.get(cause, 0.0) + own
            counts[cause] = counts.get(cause, 0) + 1
            """,
            "phases, causes = [], []": "counts, phases, causes = {}, [], []",
            'most = max(sums, key=sums.get, default="healthy")': 'most = max(counts, key=counts.get) if max(sums.values()) >= total / 5 else "healthy"',
            "return most if sums.get(most, 0.0) >= total / 5": "return most if counts",
        },
        also=["check_alone"],
    ),
    Mutant(
        "The durations, not the self times",
        "check_most_time",
        says="not durations",
        replace={"sums[cause] = sums.get(cause, 0.0) + own": "sums[cause] = sums.get(cause, 0.0) + length"},
    ),
    Mutant(
        "The first cause that takes a fifth of the steps",
        "check_most_time",
        says="takes about half of its time",
        replace={
            'most = max(sums, key=sums.get, default="healthy")': 'most = next((cause for cause in sums if sums[cause] >= total / 5), "healthy")'
        },
    ),
    Mutant(
        "Each span has the cause that its name says",
        "check_alone",
        says="all spans within `aten::to` belong to the copy",
        replace={
            '{"aten::item": "read", "aten::to": "copy"}.get(name, "")': '{"aten::item": "read", "aten::_local_scalar_dense": "read", "cudaStreamSynchronize": "read", "aten::to": "copy", "aten::_to_copy": "copy", "aten::copy_": "copy", "cudaMemcpyAsync": "copy"}.get(name, "")',
            'if cause not in ("read", "copy"):': "if True:",
        },
        also=["check_most_time"],
    ),
    Mutant(
        "An operator with the name of one of forward is repeated",
        "check_healthy",
        says="with shapes that `forward` does not have is not repeated",
        replace={'(name, span["dtype"], str(span["shapes"]))': "name"},
    ),
    Mutant(
        "What happens outside of the steps counts",
        "check_healthy",
        says="only spans of the steps and within them count",
        replace={"if phase and cause:": "if cause:"},
    ),
    Mutant(
        "Every program has a bottleneck",
        "check_healthy",
        says="a bottleneck takes at least a fifth of the steps",
        replace={'return most if sums.get(most, 0.0) >= total / 5 else "healthy"': "return most"},
    ),
    Mutant(
        "Small operators are not looked for",
        "check_alone",
        says="together they take most of the step",
        replace={"elif length < 0.05:": "elif length < 0.0:"},
        also=["check_most_time", "check_healthy"],
    ),
    Mutant(
        "Conversions and reads pass nothing on",
        "check_alone",
        says="belong to the",
        replace={'if cause not in ("read", "copy"):': "if True:"},
        also=["check_most_time"],
    ),
]
