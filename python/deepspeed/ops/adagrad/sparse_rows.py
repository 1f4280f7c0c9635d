"""Sparse gradients for an optimizer whose update leaves an element without a gradient as it is."""


class SparseRows:
    """Updates only the rows that a sparse gradient has. A mixin before ``NativeOptimizer``."""

    def _update(self, rule, args, device, step, params, grads, states):
        dense = [i for i, grad in enumerate(grads) if not grad.is_sparse]
        for i, grad in enumerate(grads):
            if grad.is_sparse:
                self._update_rows(rule, args, device, step, params[i], grad, [slot[i] for slot in states])
        if dense:
            own = [[slot[i] for i in dense] for slot in states]
            super()._update(rule, args, device, step, [params[i] for i in dense], [grads[i] for i in dense], own)

    def _update_rows(self, rule, args, device, step, param, grad, states):
        if args["weight_decay"] != 0:
            raise RuntimeError(
                f"{type(self).__name__}: weight_decay decays every row, but a parameter of shape {tuple(param.shape)} "
                "has a sparse gradient, which updates some. Set weight_decay to 0 for its group, or make the layer "
                "dense (nn.Embedding(..., sparse=False))."
            )
        if grad.sparse_dim() != 1:
            raise RuntimeError(
                f"{type(self).__name__} takes sparse gradients of whole rows, but one of shape {tuple(grad.shape)} has "
                f"{grad.sparse_dim()} sparse dimensions. Pass grad.to_dense()."
            )
        grad = grad.coalesce()
        rows = grad.indices()[0]
        if not rows.numel():
            return
        part = param.index_select(0, rows)
        own = [state.index_select(0, rows) for state in states]
        super()._update(rule, args, device, step, [part], [grad.values()], [[one] for one in own])
        for whole, changed in zip([param, *states], [part, *own]):
            whole.index_copy_(0, rows, changed)
