// The extension module: starts the device, and the functions that torch._C has on a Mac.
#include "calls.h"
#include "queue.h"

#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/ScalarOps.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <pthread.h>

#include <atomic>

namespace py = pybind11;

namespace metal {
namespace {

std::atomic<bool> in_bad_fork{false};
std::atomic<int> asked{0}; // how often somebody asked whether there is a device

// PyTorch warns, once in a process, that a kernel of its own is replaced, as composite.cpp does. That a wheel without
// Metal makes these necessary is nobody's business; that a program replaces others is, so the once is not used up.
class Unheard {
 public:
  Unheard() : always_(c10::WarningUtils::get_warnAlways()), guard_(&quiet_) {
    c10::WarningUtils::set_warnAlways(true);
  }
  ~Unheard() {
    c10::WarningUtils::set_warnAlways(always_);
  }
  Unheard(const Unheard&) = delete;

 private:
  struct Quiet final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  Quiet quiet_;
  bool always_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

void start_device(
    Profile profile,
    const std::vector<std::string>& native,
    const SparseKernels& sparse,
    const std::vector<std::string>& always_on_cpu,
    const std::string& commit) {
  Unheard unheard;
  start(std::move(profile));
  register_fallback(commit, always_on_cpu);
  register_kernels();
  register_metal_only();
  register_recurrent();
  register_composites();
  register_host_kernels(native);
  register_torchvision();
  register_sparse(sparse);
}

const at::MPSHooksInterface& hooks() {
  return at::detail::getMPSHooks();
}

py::dict memory() {
  const auto figures = memory_figures();
  py::dict result;
  result["current"] = figures.current;
  result["driver"] = figures.driver;
  result["peak"] = figures.peak;
  return result;
}

int times_asked() {
  return asked;
}

py::dict work_done() {
  py::dict result;
  result["waits"] = work.waits.load();
  result["copies_in"] = work.copies_in.load();
  result["copies_out"] = work.copies_out.load();
  result["bytes_in"] = work.bytes_in.load();
  result["bytes_out"] = work.bytes_out.load();
  return result;
}

// What a kernel from outside, which reads and writes these tensors itself, needs before it begins.
void begin_launch(const std::vector<at::Tensor>& tensors) {
  touch_device();
  for (const auto& tensor : tensors) {
    settle(tensor.storage());
  }
}

// A number as the tensor that stands for it in an operator's call: it does not take part in promotion as a tensor does.
at::Tensor wrapped_number(const py::object& given) {
  const auto number = PyBool_Check(given.ptr()) ? at::Scalar(given.cast<bool>())
      : PyLong_Check(given.ptr())               ? at::Scalar(given.cast<int64_t>())
      : PyFloat_Check(given.ptr())              ? at::Scalar(given.cast<double>())
                                                : at::Scalar(given.cast<c10::complex<double>>());
  auto tensor = c10::scalar_to_tensor(number);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

// Python's function that is told of waits; Python's lock guards it, and nobody frees it.
PyObject* told = nullptr;

void tell(const char* why) {
  const py::gil_scoped_acquire lock;
  if (told == nullptr) {
    return;
  }
  try {
    py::reinterpret_borrow<py::object>(told)(why);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("a listener of the simulated device");
  }
}

// None for nobody.
void listen(const py::object& function) {
  Py_XDECREF(told);
  told = function.is_none() ? nullptr : function.inc_ref().ptr();
  listen_to_waits(told == nullptr ? nullptr : &tell);
}

void define_torch_functions(py::module_& m) {
  m.def("_mps_is_in_bad_fork", [] { return in_bad_fork.load(); });
  m.def("_mps_is_available", [] {
    ++asked;
    touch_device();
    return true;
  });
  m.def("_mps_is_on_macos_or_newer", [](unsigned major, unsigned minor) { return hooks().isOnMacOSorNewer(major, minor); });
  m.def("_mps_get_name", [] { return profile().chip; });
  m.def("_mps_get_core_count", [] { return profile().cores; });
  m.def("_mps_get_default_generator", [] { return default_generator(); });
  m.def("_mps_deviceSynchronize", [] { hooks().deviceSynchronize(); });
  m.def("_mps_emptyCache", [] { hooks().emptyCache(); });
  m.def("_mps_setMemoryFraction", [](double ratio) { hooks().setMemoryFraction(ratio); });
  m.def("_mps_currentAllocatedMemory", [] { return hooks().getCurrentAllocatedMemory(); });
  m.def("_mps_driverAllocatedMemory", [] { return hooks().getDriverAllocatedMemory(); });
  m.def("_mps_recommendedMaxMemory", [] { return hooks().getRecommendedMaxMemory(); });
  m.def("_mps_host_alias_storage", [](const c10::Storage& storage) { return host_alias(storage); });
  m.def("_mps_acquireEvent", [](bool timed) { return hooks().acquireEvent(timed); });
  m.def("_mps_releaseEvent", [](uint32_t id) { hooks().releaseEvent(id); });
  m.def("_mps_recordEvent", [](uint32_t id) { hooks().recordEvent(id); });
  m.def("_mps_waitForEvent", [](uint32_t id) { hooks().waitForEvent(id); });
  m.def("_mps_synchronizeEvent", [](uint32_t id) { hooks().synchronizeEvent(id); });
  m.def("_mps_queryEvent", [](uint32_t id) { return hooks().queryEvent(id); });
  m.def("_mps_elapsedTimeOfEvents", [](uint32_t start, uint32_t end) { return hooks().elapsedTimeOfEvents(start, end); });
  m.def("_mps_profilerStartTrace", [](const std::string& mode, bool wait) { hooks().profilerStartTrace(mode, wait); });
  m.def("_mps_profilerStopTrace", [] { hooks().profilerStopTrace(); });
  m.def("_mps_isCaptureEnabled", [] { return false; });
  m.def("_mps_isCapturing", [] { return false; });
}

} // namespace
// As torch/csrc/mps/Module.cpp: once the device was looked for or used, a forked child must not touch its parent's.
void touch_device() {
  static const int armed = pthread_atfork(nullptr, nullptr, [] { in_bad_fork = true; });
  (void)armed;
}

} // namespace metal

PYBIND11_MODULE(_metal, m) {
  m.def(
      "start",
      [](std::string chip,
         int cores,
         size_t recommended_max,
         int macos_major,
         int macos_minor,
         const std::vector<std::string>& native,
         const metal::SparseKernels& sparse,
         const std::vector<std::string>& always_on_cpu,
         const std::string& commit) {
        metal::start_device(
            {std::move(chip), cores, recommended_max, macos_major, macos_minor}, native, sparse, always_on_cpu, commit);
      },
      py::kw_only(),
      py::arg("chip"),
      py::arg("cores"),
      py::arg("recommended_max"),
      py::arg("macos_major"),
      py::arg("macos_minor"),
      py::arg("native"),
      py::arg("sparse"),
      py::arg("always_on_cpu"),
      py::arg("commit"));
  m.def("memory", &metal::memory);
  m.def("reset_peak", &metal::reset_peak);
  m.def("times_asked", &metal::times_asked);
  m.def("work_done", &metal::work_done);
  m.def("name_launches", &metal::name_launches);
  m.def("named_launches", &metal::named_launches);
  m.def("begin_launch", &metal::begin_launch);
  m.def("record_calls", &metal::record_calls);
  m.def("recording", &metal::recording);
  m.def("calls_recorded", &metal::calls_recorded);
  m.def("recorded_calls", &metal::recorded_calls);
  m.def("launched", &metal::launched_outside);
  m.def("wrapped_number", &metal::wrapped_number);
  m.def("listen", &metal::listen);
  m.def("finish", &metal::finish);
  m.def("switch_fault", &metal::switch_fault);
  m.def("faults_on", &metal::faults_on);
  m.def("stop_gpu_at", &metal::stop_gpu_at);
  m.def("take_longest_sum", &metal::take_longest_sum);
  m.def("set_limit", &metal::set_limit);
  // A module of their own names: what goes into torch._C, and nothing else.
  auto functions = m.def_submodule("torch_functions");
  metal::define_torch_functions(functions);
}
