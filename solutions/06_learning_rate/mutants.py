"""Planted mistakes of The learning rate, found and scheduled, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- sweep
    Mutant(
        "The rates grow by a constant difference, not by a constant factor",
        "check_sweep_factor",
        says="not exponential",
        replace={"* (highest / lowest) ** (i / (count - 1))": "+ (highest - lowest) * i / (count - 1)"},
    ),
    Mutant(
        "The exponent assumes n gaps between n rates, so the highest rate is never reached",
        "check_sweep_ends",
        says="n - 1 gaps",
        replace={"i / (count - 1)": "i / count"},
    ),
    # -- range_test
    Mutant(
        "The gradients are never cleared",
        "check_range_losses",
        says="gradients of earlier steps are still there",
        replace={
            """
            model.zero_grad()
            loss = loss_of(model, batch)
            """: "loss = loss_of(model, batch)",
        },
    ),
    Mutant(
        "The loss is measured after each step, not before it",
        "check_range_losses",
        says="taken after its step",
        replace={
            "losses.append(loss.item())": "",
            """
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
            """: """
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
            losses.append(loss_of(model, batch).item())
            """,
        },
    ),
    Mutant(
        "The parameters are restored, the running means are not",
        "check_buffers_back",
        says="A model has buffers besides its parameters",
        replace={
            "copy.deepcopy(model.state_dict())": "copy.deepcopy(dict(model.named_parameters()))",
            "model.load_state_dict(before)": "model.load_state_dict(before, strict=False)",
        },
    ),
    Mutant(
        "The state dict is kept without a copy, so it changes with the model",
        "check_range_weights_back",
        says="copy the values first",
        replace={
            "copy.deepcopy(model.state_dict())": """
            {**model.state_dict(), **copy.deepcopy(dict(model.named_buffers()))}
            """,
        },
    ),
    Mutant(
        "The model keeps its mode during the test",
        "check_modes",
        says="call model.train() before the first batch",
        replace={
            """
            model.train()
            losses = []
            """: "losses = []"
        },
    ),
    Mutant(
        "After the test the model stays in training mode",
        "check_modes",
        says="restore the mode",
        replace={"model.train(was_training)": ""},
    ),
    Mutant(
        "No test is made",
        "check_modes",
        says="does not return the losses of its steps",
        answer="""
        def range_test(model, loss_of, batches, rates):
            return [0.0]
        """,
        also=("check_range_losses", "check_range_weights_back", "check_buffers_back"),
    ),
    # -- smoothed
    Mutant(
        "The mean starts at 0 and is not corrected",
        "check_smoothed",
        says="too low at first",
        replace={
            "for k, loss in enumerate(losses, 1):": "for loss in losses:",
            "curve.append(mean / (1 - beta**k))": "curve.append(mean)",
        },
    ),
    # -- suggest
    Mutant(
        "The bottom is taken where the loss rises for the first time",
        "check_bottom",
        says="is not the bottom",
        replace={
            'return {"steepest": rates[steepest], "bottom": rates[bottom]}': """
            first_rise = next(i for i in range(len(losses) - 1) if losses[i + 1] > losses[i])
            return {"steepest": rates[steepest], "bottom": rates[first_rise]}
            """,
        },
    ),
    Mutant(
        "The slope is computed over the rate, not over its logarithm, which favours the lowest rates",
        "check_steepest",
        says="logarithmic axis",
        replace={
            "math.log(rates[i + 1] / rates[i - 1])": "(rates[i + 1] - rates[i - 1])",
        },
    ),
    Mutant(
        "The steepest place is searched after the bottom too",
        "check_steepest_before_bottom",
        says="Search only before the bottom",
        replace={
            "steepest = min(range(1, bottom), key=slope)": """
            steepest = min(range(1, len(losses) - 1), key=slope)
            """,
        },
    ),
    # -- decay
    Mutant(
        "The rate is cut one step too early",
        "check_step_factor",
        says="have factor 1",
        replace={"return gamma ** (step // every)": "return gamma ** ((step + 1) // every)"},
    ),
    Mutant(
        "The cosine falls to 0 and is cut off at its end",
        "check_cosine_factor",
        says="scale it",
        replace={
            "return final + (1 - final) * (1 + math.cos(math.pi * min(step / steps, 1.0))) / 2": """
            return max(final, (1 + math.cos(math.pi * min(step / steps, 1.0))) / 2)
            """,
        },
    ),
    Mutant(
        "The cosine rises again after its end",
        "check_cosine_after_end",
        says="stays at",
        replace={"min(step / steps, 1.0)": "step / steps"},
    ),
    # -- warmup
    Mutant(
        "The first step of the warm-up has the factor 1 / warm",
        "check_rise",
        says="starts at 0",
        answer="""
        def warmup_cosine(step, warm, steps, final=0.0):
            if step < warm:
                return (step + 1) / warm
            return cosine_factor(step - warm, steps - warm, final)
        """,
    ),
    Mutant(
        "The cosine is that of the whole run, as if there were no warm-up",
        "check_after_rise",
        says="starts when the warm-up ends",
        answer="""
        def warmup_cosine(step, warm, steps, final=0.0):
            return step / warm if step < warm else cosine_factor(step, steps, final)
        """,
    ),
    Mutant(
        "Without a warm-up the first step still has the factor 0",
        "check_no_warm_up",
        says="the first step has factor 1",
        answer="""
        def warmup_cosine(step, warm, steps, final=0.0):
            if step <= warm:
                return step / max(1, warm)
            return cosine_factor(step - warm, steps - warm, final)
        """,
    ),
    Mutant(
        "The cosine rises again after the end of the run",
        "check_no_warm_up",
        says="After step `steps` the factor stays",
        replace={
            "share = min((step - warm) / (steps - warm), 1.0)": "share = (step - warm) / (steps - warm)"
        },
    ),
    # -- cyclical
    Mutant(
        "The lowest rate is halved too",
        "check_halved",
        says="Halve the height above",
        replace={"lowest + (1 - lowest) * height": "(lowest + (1 - lowest) * height)"},
    ),
    Mutant(
        "The triangles start at 0 and are cut off at the lowest rate",
        "check_triangular",
        says="from `lowest` to 1",
        replace={"(0.5**cycle if halve else 1.0)": "0.5**cycle if halve else max(lowest, height)"},
    ),
    # -- one_cycle
    Mutant(
        "The rate rises in a straight line",
        "check_cycle_rise",
        says="Half a cosine from",
        replace={"between(start, 1.0, step / top)": "start + (1 - start) * step / top"},
    ),
    Mutant(
        "The momentum rises with the rate",
        "check_cycle_momentum",
        says="while the rate rises",
        replace={"between(high, low, step / top)": "between(low, high, step / top)"},
    ),
    Mutant(
        "The cosines continue after the last step",
        "check_cycle_end",
        says="nothing changes",
        replace={
            "share = (min(step, steps - 1) - top) / (steps - 1 - top)": """
            share = (step - top) / (steps - 1 - top)
            """,
        },
    ),
    Mutant(
        "The rate reaches its end one step after the last",
        "check_cycle_fall",
        says="the last one",
        replace={
            "return between(1.0, final, share), between(low, high, share)": """
            late = (step - top) / (steps - top) if step < steps else 1.0
            return between(1.0, final, late), between(low, high, share)
            """,
        },
    ),
    # -- wsd
    Mutant(
        "The warm-up starts at 0, not at the lowest rate",
        "check_stable",
        says="rise from",
        replace={"return lowest + (1 - lowest) * step / warm": "return step / warm"},
    ),
    Mutant(
        "Without a decay the rate never falls",
        "check_empty_phases",
        says="may have no steps",
        replace={
            "if step < warm + stable:": """
            done = step - warm - stable
            if done < 0 or decay == 0:
            """,
            """
            done = step - warm - stable
            return lowest + (1 - lowest) * (1 - math.sqrt(done / decay)) if done < decay else lowest
            """: "return lowest + (1 - lowest) * (1 - math.sqrt(min(done / decay, 1.0)))",
        },
    ),
    Mutant(
        "The fall is a straight line",
        "check_cool_down",
        says="1 - sqrt",
        replace={"math.sqrt(done / decay)": "done / decay"},
    ),
    Mutant(
        "OneCycleLR of PyTorch computes the factors",
        "check_cycle_rise",
        says="do not use one in it",
        answer="""
        def one_cycle(step, top, steps, start, final, low, high):
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=high)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer,
                1.0,
                steps,
                pct_start=(top + 1) / steps,
                div_factor=1 / start,
                final_div_factor=start / final,
                base_momentum=low,
                max_momentum=high,
            )
            for _ in range(min(step, steps - 1)):
                optimizer.step()
                scheduler.step()
            return optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]
        """,
        also=("check_cycle_fall", "check_cycle_momentum", "check_cycle_end"),
    ),
    # -- follow
    Mutant(
        "All groups start with the rate of the first",
        "check_groups",
        says="its own peak",
        replace={
            """
            self.peaks = [group["lr"] for group in optimizer.param_groups]
            self._set()
            """: """
            self.peaks = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = self.peaks[0] * factor(0)
            """,
        },
    ),
    Mutant(
        "After loading, the rates are set only in the next step",
        "check_resume",
        says="set them at once",
        replace={
            """
            self.done, self.peaks = state["done"], list(state["peaks"])
            self._set()
            """: 'self.done, self.peaks = state["done"], list(state["peaks"])',
        },
    ),
    Mutant(
        "load_state_dict sets the rates by a call of step(), so the run is one step ahead",
        "check_resume",
        says="must not call step()",
        replace={
            """
            self.done, self.peaks = state["done"], list(state["peaks"])
            self._set()
            """: """
            self.done, self.peaks = state["done"], list(state["peaks"])
            self.step()
            """,
        },
    ),
    Mutant(
        "The constructor does not set the rates",
        "check_groups",
        says="has to set each to peak × factor(0)",
        replace={
            """
            self.peaks = [group["lr"] for group in optimizer.param_groups]
            self._set()
            """: 'self.peaks = [group["lr"] for group in optimizer.param_groups]',
        },
    ),
    Mutant(
        "The factor multiplies the rate of the previous step, not the peak",
        "check_follow",
        says="Multiply the peak.",
        replace={
            "self.optimizer, self.factor, self.done = optimizer, factor, 0": """
            self.optimizer, self.factor, self.done, self.loaded = optimizer, factor, 0, False
            """,
            """
            self.done += 1
            self._set()
            """: """
            self.done += 1
            for group, peak in zip(self.optimizer.param_groups, self.peaks):
                group["lr"] = (peak if self.loaded else group["lr"]) * self.factor(self.done)
            """,
            'self.done, self.peaks = state["done"], list(state["peaks"])': """
            self.done, self.peaks, self.loaded = state["done"], list(state["peaks"]), True
            """,
        },
    ),
    Mutant(
        "The peaks are not loaded, so those of the new optimiser count",
        "check_saved_peaks",
        says="save the peaks and load them",
        replace={'self.done, self.peaks = state["done"], list(state["peaks"])': 'self.done = state["done"]'},
    ),
    Mutant(
        "The state holds the function",
        "check_plain_state",
        says="a dict of numbers and lists of numbers",
        replace={
            '"peaks": list(self.peaks)}': '"peaks": list(self.peaks), "more": (torch.tensor(self.done),)}'
        },
    ),
    Mutant(
        "The state holds the function, which no file can hold",
        "check_resume",
        says="your code raised",
        replace={'"peaks": list(self.peaks)}': '"peaks": list(self.peaks), "factor": self.factor}'},
        also=("check_saved_peaks", "check_plain_state"),
    ),
    Mutant(
        "The peaks and the steps stay in the class",
        "check_resume",
        says="set them at once",
        replace={
            'return {"done": self.done, "peaks": list(self.peaks)}': """
            Follow.kept = self.done, self.peaks
            return {}
            """,
            'self.done, self.peaks = state["done"], list(state["peaks"])': 'self.done, self.peaks = getattr(Follow, "kept", (0, self.peaks))',
        },
        also=("check_saved_peaks", "check_plain_state"),
    ),
    Mutant(
        "The class inherits from LambdaLR",
        "check_follow",
        says="do not use one in it",
        answer="""
        class Follow(torch.optim.lr_scheduler.LambdaLR):
            pass
        """,
        also=("check_groups", "check_resume", "check_saved_peaks", "check_plain_state"),
    ),
    # -- batch
    Mutant(
        "The batch is divided the wrong way round, so a larger batch gets a smaller peak",
        "check_rules",
        says="gets a *smaller* peak",
        replace={"ratio = batch / base_batch": "ratio = base_batch / batch"},
    ),
    Mutant(
        "The rule is not read: the peak always grows linearly",
        "check_rules",
        says="the rule sqrt gives",
        replace={'(ratio if rule == "linear" else math.sqrt(ratio))': "ratio"},
    ),
    Mutant(
        "The incomplete batches of all epochs are joined",
        "check_batch_steps",
        says="each epoch drops its own",
        replace={"epochs * (images // batch)": "epochs * images // batch"},
    ),
    Mutant(
        "The norm for the large batch counts as that of the true gradient",
        "check_noise_scale",
        says="it still contains S / B",
        answer="""
        def noise_scale(small, large, small_batch, large_batch):
            noise = (small - large) / (1 / small_batch - 1 / large_batch)
            return noise / large if large > noise / large_batch else math.inf
        """,
    ),
    Mutant(
        "A negative square is divided by, so the noise scale is negative",
        "check_hidden_gradient",
        says="return math.inf",
        replace={"noise / signal if signal > 0 else math.inf": "noise / signal"},
    ),
    # -- snapshots
    Mutant(
        "The last step is counted again for cycles that do not exist",
        "check_snapshot_steps",
        says="the last may have fewer",
        replace={
            "[min(end, steps) for end in range(length, steps + length, length)]": """
            [min(length * number, steps) for number in range(1, snapshots + 1)]
            """,
        },
    ),
    Mutant(
        "The length of a cycle is rounded down, so there is one snapshot too many",
        "check_snapshot_steps",
        says="ceil(steps / snapshots)",
        replace={"length = math.ceil(steps / snapshots)": "length = steps // snapshots"},
    ),
    Mutant(
        "The logits are averaged instead of the probabilities",
        "check_ensemble",
        says="outvote",
        replace={"return logits.softmax(-1).mean(0)": "return logits.mean(0).softmax(-1)"},
    ),
]
