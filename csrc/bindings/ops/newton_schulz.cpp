// deepspeed._C.newton_schulz: csrc/zero/step/newton_schulz.h.
#include "zero/step/newton_schulz.h"

#include <torch/csrc/utils/pybind.h>

#include "base/error.h"
#include "bindings/registry.h"
#include "bindings/torch_types.h"

namespace py = pybind11;

DS_BINDINGS(m) {
  m.def(
      "newton_schulz_",
      [](const at::Tensor& update, int steps, bool gram, const py::object& dtype) {
        if (update.scalar_type() != at::kFloat)
          ds::fail(ds::ErrorKind::kType, "newton_schulz_ takes fp32 tensors, not ", update.toString());
        ds::zero::NewtonSchulz iteration;
        iteration.steps = steps;
        iteration.form = gram ? ds::zero::NewtonSchulzForm::kGram : ds::zero::NewtonSchulzForm::kStandard;
        iteration.dtype = ds::bindings::optional_dtype(dtype);
        py::gil_scoped_release unlocked;
        iteration.apply(update);
      },
      "update"_a, "steps"_a = 5, "gram"_a = true, "dtype"_a = py::none(),
      "Overwrites a fp32 tensor, a matrix of shape[0] rows, with its orthogonalisation times sqrt(max(1, rows / "
      "columns))");
}
