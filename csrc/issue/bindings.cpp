#include "issue/bindings.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <tuple>
#include <utility>

#include "issue/log.h"
#include "issue/program.h"

namespace symm_overlap::issue {

namespace py = pybind11;

namespace {

// Wraps an operand in a separate type. Given the variant itself, pybind11 would try one alternative after another.
struct Holder {
  Operand operand;
};

std::vector<Operand> operands(const std::vector<Holder>& holders) {
  std::vector<Operand> result;
  for (const Holder& holder : holders) {
    result.push_back(holder.operand);
  }
  return result;
}

std::optional<Operand> optional(const std::optional<Holder>& holder) {
  return holder ? std::optional(holder->operand) : std::nullopt;
}

Place place(std::pair<int, int64_t> numbers) {
  return {numbers.first, numbers.second};
}

void register_kernel(py::module_& module) {
  py::class_<Kernel>(module, "Kernel")
      .def(py::init([](uint64_t function, unsigned int programs, unsigned int threads, unsigned int shared_bytes) {
        return Kernel{function, programs, threads, shared_bytes, {}};
      }))
      .def("address", [](Kernel& kernel, int tensor) { kernel.parameters.emplace_back(Address{tensor}); })
      .def("number", [](Kernel& kernel, int64_t value) { kernel.parameters.emplace_back(Number{value}); })
      .def("matrix", [](Kernel& kernel, int tensor, int element_type, int swizzle, std::array<uint64_t, 2> sizes,
                        uint64_t stride, std::array<uint32_t, 2> box) {
        kernel.parameters.emplace_back(Matrix{tensor, element_type, swizzle, sizes, stride, box});
      });
}

void register_program(py::module_& module) {
  using Numbers = std::vector<int64_t>;
  py::class_<Holder>(module, "Operand")
      .def_static("fixed", [](const at::Tensor& tensor) { return Holder{tensor}; })
      .def_static("whole", [](int tensor) { return Holder{Whole{tensor}}; })
      .def_static("slice", [](int tensor, int64_t dim, int64_t start,
                              int64_t length) { return Holder{Slice{tensor, dim, start, length}}; })
      .def_static("part", [](int tensor, Numbers sizes, Numbers strides, int64_t offset) {
        return Holder{Part{tensor, std::move(sizes), std::move(strides), offset}};
      });
  // A place is (tensor, bytes from its start), or (-1, address). Rows are (count, bytes, target stride, source stride).
  py::class_<Program>(module, "Program")
      .def(py::init<>())
      .def("signal", [](Program& program, int stream, std::vector<int> peers,
                        int channel) { program.add({stream, Signal{std::move(peers), channel}}); })
      .def("wait", [](Program& program, int stream, std::vector<int> peers,
                      int channel) { program.add({stream, Wait{std::move(peers), channel}}); })
      .def("barrier", [](Program& program, int stream, int channel) { program.add({stream, Barrier{channel}}); })
      .def("sleep", [](Program& program, int stream) { program.add({stream, Sleep{}}); })
      .def("record", [](Program& program, int stream, int event) { program.add({stream, Record{event}}); })
      .def("follow", [](Program& program, int stream, int event) { program.add({stream, Follow{event}}); })
      .def("enter", [](Program& program, int stream) { program.add({stream, Enter{}}); })
      .def("pace", [](Program& program, int stream, int64_t ns) { program.add({stream, Pace{ns}}); })
      .def("copy",
           [](Program& program, int stream, std::pair<int, int64_t> to, std::pair<int, int64_t> from,
              std::tuple<int64_t, int64_t, int64_t, int64_t> rows) {
             const auto [count, bytes, to_stride, from_stride] = rows;
             program.add({stream, Copy{place(to), place(from), {count, bytes, to_stride, from_stride}}});
           })
      .def("copy_tensor", [](Program& program, int stream, const Holder& to,
                             const Holder& from) { program.add({stream, CopyTensor{to.operand, from.operand}}); })
      .def("make",
           [](Program& program, int stream, int tensor, const at::Tensor& like) {
             program.add({stream, Make{tensor, like.new_empty({0}), like.sizes().vec()}});
           })
      .def("add", [](Program& program, int stream, const Holder& out,
                     const Holder& addend) { program.add({stream, Add{out.operand, addend.operand}}); })
      .def("multiply_scaled",
           [](Program& program, int stream, const Holder& a, const Holder& scale_a, const Holder& b,
              const Holder& scale_b, const std::optional<Holder>& bias, const std::optional<Holder>& result_scale,
              bool fast, bool in_float32, const Holder& out) {
             program.add({stream, MultiplyScaled{a.operand, scale_a.operand, b.operand, scale_b.operand, optional(bias),
                                                 optional(result_scale), fast, in_float32, out.operand}});
           })
      .def("multiply",
           [](Program& program, int stream, const Holder& a, const Holder& b, const Holder& out, bool add,
              const std::optional<Holder>& bias) {
             program.add({stream, Multiply{a.operand, b.operand, out.operand, add, optional(bias)}});
           })
      .def("sum",
           [](Program& program, int stream, const std::vector<Holder>& partials, bool average, const Holder& out,
              const std::optional<Holder>& copy) {
             program.add({stream, Sum{operands(partials), average, out.operand, optional(copy)}});
           })
      .def("meet_and_sum",
           [](Program& program, int stream, int channel, const std::vector<Holder>& partials, bool average,
              const Holder& out, const std::optional<Holder>& copy, std::optional<int> done_channel, int64_t) {
             Sum sum{operands(partials), average, out.operand, optional(copy)};
             program.add({stream, MeetAndSum{channel, std::move(sum), done_channel}});
           })
      .def("await_and_gather",
           [](Program& program, int stream, int channel, Numbers from, int64_t part_bytes, const Holder& out, int64_t) {
             program.add({stream, AwaitAndGather{channel, std::move(from), part_bytes, out.operand}});
           })
      .def("raise_flag", [](Program& program, int stream, std::shared_ptr<Flags> flags,
                            int chunk) { program.add({stream, Raise{std::move(flags), chunk}}); })
      .def("await_flag", [](Program& program, int stream, std::shared_ptr<Flags> flags,
                            int chunk) { program.add({stream, Await{std::move(flags), chunk}}); })
      .def("launch",
           [](Program& program, int stream, const Kernel& kernel, const std::vector<Holder>& tensors) {
             program.add({stream, Launch{kernel, operands(tensors)}});
           })
      .def("name", &Program::name)
      .def("run", &Program::run)
      .def("__len__", &Program::size)
      .def_property_readonly("at", &Program::at);
}

}  // namespace

void register_issue(py::module_& module) {
  py::class_<Driver>(module, "Driver")
      .def("abandon", &Driver::abandon)
      .def_property_readonly("has_fused_meetings", &Driver::has_fused_meetings);
  py::class_<LogDriver, Driver>(module, "LogDriver")
      .def(py::init<>())
      .def("poison", &LogDriver::poison)
      .def("take", [](LogDriver& log) {
        py::list entries;
        for (const Entry& entry : log.take()) {
          entries.append(py::make_tuple(entry.what, entry.stream, py::tuple(py::cast(entry.numbers))));
        }
        return entries;
      });
  py::class_<Flags, std::shared_ptr<Flags>>(module, "Flags");
  py::class_<NoFlags, Flags, std::shared_ptr<NoFlags>>(module, "NoFlags").def(py::init<>());
  register_kernel(module);
  register_program(module);
}

}  // namespace symm_overlap::issue
