"""Lower qfuse:: ops to Inductor IR or extern kernels, from the first call of the backend on."""

import functools

assert __name__ == "inductor_q.lowerings", f"import it as inductor_q.lowerings, not {__name__}"


@functools.cache
def register() -> None:
    """Register the lowerings of the `qfuse::` ops with Inductor (further calls do nothing).

    Only our namespace is touched: `backend="inductor"` lowers everything else as before.
    """
    from inductor_q.lowerings import (
        adapter_grads,
        add_product,
        copies,
        dequantize,
        direct_call,
        extend,
        materialize,
        requantize,
    )
    from inductor_q.ops.registry import define_ops

    define_ops()
    adapter_grads.register()
    add_product.register()
    copies.register()
    dequantize.register()
    direct_call.register()
    extend.register()
    materialize.register()
    requantize.register()
