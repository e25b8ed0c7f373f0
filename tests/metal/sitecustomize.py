"""A stand-in for PyTorch's Metal backend: tensors whose device is `mps`, computed by PyTorch's CPU backend.

Python imports this file at its start where its folder is on PYTHONPATH. It is as strict as Metal in what programs trip
over: no numbers of 64 bits with a fraction, no operation of tensors on two devices, no memory that the host reads.
"""

import sys


def install() -> None:
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    aten = torch.ops.aten
    moves = (aten._to_copy.default,)
    indexes = aten.index.Tensor, aten.index_put.default, aten.index_put_.default

    def is_metal(device) -> bool:
        return device is not None and torch.device(device).type == "mps"

    def inner(x):
        return x.inner if isinstance(x, Metal) else x

    class Metal(torch.Tensor):
        @staticmethod
        def __new__(cls, held):
            if held.dtype == torch.float64:
                raise TypeError("the MPS framework doesn't support float64")
            return torch.Tensor._make_wrapper_subclass(
                cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
                device="mps", requires_grad=False,
            )  # fmt: skip

        def __init__(self, held):
            self.inner = held

        __torch_function__ = torch._C._disabled_torch_function_impl

        def __getitem__(self, index):  # C++'s would ask for a device of Metal's
            return Metal(self.inner[tree_map(inner, index)])

        def __setitem__(self, index, value):
            if isinstance(value, torch.Tensor) and value.dim() and not isinstance(value, Metal):
                raise RuntimeError("a tensor of the CPU is put into one of mps")
            self.inner[tree_map(inner, index)] = inner(value)

        def contiguous(self, **_):
            return self if self.is_contiguous() else Metal(self.inner.contiguous())

        def view(self, *shape):
            return Metal(self.inner.view(*shape))

        def numpy(self, *_, **__):
            raise TypeError("can't convert mps device type tensor to numpy")

        def data_ptr(self):
            raise RuntimeError("the host reads no memory of mps")

        def tolist(self):
            return self.inner.tolist()

        def is_pinned(self, *_):
            return False

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if func not in (*moves, *indexes) and any(x.dim() and not isinstance(x, cls) for x in given):
                raise RuntimeError(f"{func}: expected all tensors to be on the same device, mps and cpu are given")
            on = kwargs.get("device")
            if on is not None:
                kwargs["device"] = torch.device("cpu")
            made = func(*tree_map(inner, args), **tree_map(inner, kwargs))
            if on is not None and not is_metal(on):  # a copy to the host
                return made.clone() if any(made is inner(x) for x in given) else made
            known = {id(x.inner): x for x in given if isinstance(x, cls)}  # what is changed in place
            host = {id(x) for x in given if not isinstance(x, cls)}

            def wrapped(x):
                if not isinstance(x, torch.Tensor) or id(x) in host:
                    return x
                return known.get(id(x)) if id(x) in known else cls(x)

            return tree_map(wrapped, made)

    def empty(size, *, dtype=None, **_):
        return Metal(torch.empty(size, dtype=dtype or torch.get_default_dtype()))

    def empty_strided(size, stride, *, dtype=None, **_):
        return Metal(torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype()))

    library = install.library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", empty, "MPS")
    library.impl("empty_strided", empty_strided, "MPS")
    # C++ would ask for a device of Metal's before these come to the class.
    real_to, real_tensor, real_copy = torch.Tensor.to, torch.tensor, torch.Tensor.copy_

    def to(self, *args, **kwargs):
        if args and isinstance(args[0], Metal) and not isinstance(self, Metal):  # as another tensor is
            return Metal(real_to(self, args[0].dtype).clone())
        named = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device | str)]
        if isinstance(self, Metal) or not named or not is_metal(named[0]):
            return real_to(self, *args, **kwargs)
        host = [torch.device("cpu") if isinstance(x, torch.device | str) else x for x in args]
        made = real_to(self, *host, **{k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()})
        return Metal(made.clone() if made is self else made)

    def tensor(data, *, device=None, **more):
        return to(real_tensor(data, **more), device) if is_metal(device) else real_tensor(data, device=device, **more)

    def copy(self, source, non_blocking=False):
        real_copy(inner(self), inner(source))
        return self

    real_attend = torch.nn.functional.scaled_dot_product_attention

    def attend(*args, **kwargs):
        made = real_attend(*tree_map(inner, args), **tree_map(inner, kwargs))
        return Metal(made) if isinstance(args[0], Metal) else made

    torch.Tensor.to, torch.tensor, torch.Tensor.copy_ = to, tensor, copy
    torch.nn.functional.scaled_dot_product_attention = attend
    torch.backends.mps.is_available = lambda: True
    torch.mps.recommended_max_memory = lambda: 8 << 30
    torch.mps.driver_allocated_memory = lambda: 1 << 30
    torch.mps.empty_cache = torch.mps.synchronize = lambda: None


if "phalanx.rank" in sys.orig_argv:
    install()
