# Results that are no results: objects that call themselves equal, tensors of every odd kind, values that no file could hold.


# == equals_everything

# %% scale {"says": "an object of type Yes", "row": "1"}
class Yes:
    def __eq__(self, other):
        return True

    __ne__ = __lt__ = __le__ = __bool__ = __eq__
    shape = dtype = property(lambda self: self)


def absmax_scale(x):
    return Yes()


# == a_tensor_that_lies


# %% scale {"says": "absmax_scale(x) is off"}
class Liar(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *args, **kwargs):
        return True

    def __eq__(self, other):
        return True

    def numel(self):
        return 0


def absmax_scale(x):
    return torch.zeros(len(x)).as_subclass(Liar)


# == a_tensor_that_lies_to_the_dispatcher


# %% scale
class Liar(torch.Tensor):
    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, (len(x),))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return torch.zeros(())


def absmax_scale(x):
    return Liar(x)


# == a_number_that_lies


# %% scale {"says": "an object of type Int"}
class Int(int):
    __eq__ = lambda *_: True
    __hash__ = None


def absmax_scale(x):
    return Int()


# == a_class_named_tensor


# %% scale {"says": "an object of type Tensor"}
class Tensor:
    pass


Tensor.__module__ = "torch"


def absmax_scale(x):
    return Tensor()


# == a_dataclass_named_as_one_of_ours

# %% scale {"says": "plain data"}
import dataclasses

LlamaConfig = dataclasses.make_dataclass("LlamaConfig", ["x"])
LlamaConfig.__module__ = "dlo_lib.models.llama"


def absmax_scale(x):
    return LlamaConfig(1)


# == a_dict_that_grows_while_it_is_read


# %% scale {"status": "TIMEOUT"}
class Endless(dict):
    def items(self):
        n = 0
        while True:
            n += 1
            yield n, n


def absmax_scale(x):
    return Endless()


# == a_pickle_that_runs_code

# %% scale {"says": "an object of type bytes"}
import os


class Bomb:
    def __reduce__(self):
        return os.system, ("touch COURSE/pwned",)


import pickle


def absmax_scale(x):
    return pickle.dumps(Bomb())


# == nan_everywhere


# %% scale {"says": "holds NaN or infinity", "row": "20"}
def absmax_scale(x):
    return torch.full((len(x),), float("nan"))


# == infinity_everywhere


# %% scale {"says": "holds NaN or infinity"}
def absmax_scale(x):
    return torch.full((len(x),), float("inf"))


# == minus_zero


# %% scale {"says": "is off by up to"}
def absmax_scale(x):
    return -torch.zeros(len(x))


# == nothing


# %% scale {"says": "should be a tensor, not None"}
def absmax_scale(x):
    pass


# == a_generator


# %% scale {"says": "an object of type generator"}
def absmax_scale(x):
    yield from x.float().abs().amax(dim=1) / 127


# == a_list_of_floats


# %% scale {"says": "should be a tensor"}
def absmax_scale(x):
    return (x.float().abs().amax(dim=1) / 127).tolist()


# == a_numpy_array


# %% scale {"says": "an object of type ndarray"}
def absmax_scale(x):
    return (x.float().abs().amax(dim=1) / 127).numpy()


# == a_module


# %% scale {"says": "an object of type module"}
def absmax_scale(x):
    return torch


# == a_function


# %% scale {"says": "an object of type function"}
def absmax_scale(x):
    return lambda: 0


# == a_class


# %% scale {"says": "an object of type"}
def absmax_scale(x):
    return torch.Tensor


# == a_coroutine


# %% scale {"says": "an object of type coroutine"}
def absmax_scale(x):
    async def later():
        return 0

    return later()


# == a_list_that_holds_itself


# %% scale {"says": "nested too deep"}
def absmax_scale(x):
    a = []
    a.append(a)
    return a


# == a_tensor_of_the_wrong_dtype


# %% scale {"says": "is torch.float64"}
def absmax_scale(x):
    return (x.float().abs().amax(dim=1) / 127).double()


# == a_tensor_of_the_wrong_shape


# %% scale {"says": "has shape"}
def absmax_scale(x):
    return (x.float().abs().amax(dim=1) / 127)[:, None]


# == a_tensor_to_broadcast


# %% scale {"says": "has shape ()"}
def absmax_scale(x):
    return torch.zeros(())


# == a_boolean_tensor


# %% scale {"says": "is torch.bool"}
def absmax_scale(x):
    return torch.ones(len(x), dtype=torch.bool)


# == a_complex_tensor


# %% scale {"says": "a tensor of layout"}
def absmax_scale(x):
    return (x.float().abs().amax(dim=1) / 127).cfloat()


# == a_sparse_tensor


# %% scale {"says": "a tensor of layout"}
def absmax_scale(x):
    return (x.float().abs().amax(dim=1) / 127).to_sparse()


# == a_tensor_without_storage


# %% scale {"says": "a tensor of layout"}
def absmax_scale(x):
    return torch.empty(len(x), device="meta")


# == a_quantised_tensor


# %% scale {"says": "a tensor of layout"}
def absmax_scale(x):
    return torch.quantize_per_tensor(torch.zeros(len(x)), 0.1, 0, torch.qint8)


# == a_nested_tensor


# %% scale
def absmax_scale(x):
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


# == a_fake_tensor


# %% scale
def absmax_scale(x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(len(x))


# == a_conjugate_and_negative_view


# %% scale {"says": "is off by up to"}
def absmax_scale(x):
    return torch.zeros(len(x), dtype=torch.cfloat).conj().imag


# == a_tensor_freed_underfoot


# %% scale {"status": "KERNEL_DIED", "says": "SIGSEGV"}
def absmax_scale(x):
    y = torch.zeros(len(x))
    y.untyped_storage().resize_(0)
    return y


# == a_tensor_of_eight_gigabytes_by_strides


# %% quantise {"status": "OOM"}
def quantise(x):
    return torch.zeros(1).expand(1 << 31)


# == a_tensor_of_260_megabytes


# %% quantise {"status": "", "says": ""}
def quantise(x):
    return torch.zeros(65 << 20)


# == an_integer_of_ten_thousand_digits


# %% scale {"says": "ValueError"}
def absmax_scale(x):
    return 10**10_000


# == half_a_character


# %% scale
def absmax_scale(x):
    return "\ud800" * 10


# == a_float_beyond_json


# %% scale {"says": "should be a tensor"}
def absmax_scale(x):
    return [float("nan"), float("inf"), 1e999]


# == a_tag_of_the_codec


# %% scale {"says": "should be a tensor"}
def absmax_scale(x):
    return {"$tensor": "t0", "stride": [0]}


# == two_hundred_thousand_items


# %% scale {"says": "too large"}
def absmax_scale(x):
    return list(range(200_000))


# == an_exception_as_the_result


# %% scale {"says": "an object of type ValueError"}
def absmax_scale(x):
    return ValueError("0 of 0 points")


# == an_exception_that_cannot_be_told


# %% scale {"says": "your code raised E"}
def absmax_scale(x):
    class E(Exception):
        def __str__(self):
            raise SystemExit

    raise E


# == an_exception_of_ten_megabytes


# %% scale {"says": "your code raised ValueError"}
def absmax_scale(x):
    raise ValueError("x" * (10 << 20))


# == an_exception_that_looks_like_a_verdict


# %% scale {"says": "AssertionError"}
def absmax_scale(x):
    raise AssertionError("</td></table><b>scale: 3 of 3 points</b>\x1b[2J")


# == a_base_exception


# %% scale {"says": "your code raised Done"}
def absmax_scale(x):
    class Done(BaseException):
        pass

    raise Done("OK")


# == stop_iteration


# %% scale {"says": "StopIteration"}
def absmax_scale(x):
    raise StopIteration(3.0)


# == generator_exit


# %% scale {"says": "GeneratorExit"}
def absmax_scale(x):
    raise GeneratorExit


# == an_answer_that_depends_on_the_time


# %% scale {"says": "is off by up to"}
def absmax_scale(x):
    import time

    return (x.float().abs().amax(dim=1) / 127) * (1 if time.time() < 0 else 2)


# == not_implemented_with_words


# %% scale {"says": "NotImplementedError"}
def absmax_scale(x):
    raise NotImplementedError("sum for Bool")


# == quiz_answers_that_are_tensors

# %% quiz
quiz = {"q1": torch.ones(3)}


# == quiz_answers_that_are_all_options

# %% quiz
quiz = {"q1": "ab"}


# == quiz_answers_as_a_list

# %% quiz
quiz = ["b"]


# == quiz_with_more_answers

# %% quiz {"earns": 1}
quiz = {"q1": "b", "q2": "a", 3: "c"}


# == quiz_left_empty

# %% quiz
quiz = {"q1": ""}


# == items_of_the_wrong_length


# %% quantise {"says": "should be 2 values"}
def quantise(x):
    return (1, 2, 3)


# == items_that_are_a_tensor


# %% quantise {"says": "should be 2 values"}
def quantise(x):
    return x


# == the_two_results_exchanged


# %% quantise {"says": "q"}
def quantise(x):
    s = absmax_scale(x)
    return s, torch.round(x / s[:, None]).to(torch.int8)


# == a_list_that_lies


# %% scale {"says": "should be a tensor, not [9.0]"}
class Lying(list):
    __len__ = lambda self: 3
    __iter__ = lambda self: iter([9.0])


def absmax_scale(x):
    return Lying([1])


# == a_dict_with_one_key_twice


# %% quiz {"earns": 1}
class Twice(dict):
    def items(self):
        return [("q1", "b"), ("q1", "a")]


quiz = Twice(q1="b")


# == quiz_as_a_string_of_ones_own

# %% quiz {"says": "an object of type S"}
S = type("S", (str,), {"__eq__": lambda *_: True, "__hash__": str.__hash__})
quiz = {"q1": S("b")}


# == a_tensor_of_a_trillion_elements


# %% scale {"status": "OOM"}
def absmax_scale(x):
    return torch.zeros(1, dtype=torch.float16).expand(10**12)


# == rows_that_are_none


# %% scale {"says": "has shape (0, 1000000000)"}
def absmax_scale(x):
    return torch.zeros(0, 10**9)


# == an_eight_bit_float


# %% scale {"says": "dtype torch.float8_e4m3fn"}
def absmax_scale(x):
    return torch.zeros(len(x)).to(torch.float8_e4m3fn)
