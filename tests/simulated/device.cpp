// Two devices over ordinary memory, for PyTorch's PrivateUse1 key: tensors that are not on the CPU,
// and that the CPU's kernels compute, on copies. What a real device refuses is refused here:
// tensors of two devices in one operation, more memory than there is, float64 where there is none.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <unordered_set>
#include <utility>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex COUNT = 2;
thread_local c10::DeviceIndex current = 0;
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

// ---- what there is of it ---------------------------------------------------------------------

c10::Device device(c10::DeviceIndex index = -1) {
  return c10::Device(TYPE, index < 0 ? current : index);
}

std::atomic<int64_t> used{0}, peak{0}, capacity{0};
std::atomic<bool> float64{true};
std::unordered_set<std::string> elementwise, indexing;  // may take numbers, indices of the CPU

void require_dtype(c10::ScalarType dtype) {
  bool wide = dtype == c10::kDouble || dtype == c10::kComplexDouble;
  TORCH_CHECK_TYPE(float64 || !wide, "Cannot convert a simulated tensor to float64 dtype as the "
                   "simulated framework doesn't support float64.");
}

struct Block {
  size_t bytes;
  void* memory;

  explicit Block(size_t bytes) : bytes(bytes) {
    int64_t size = static_cast<int64_t>(bytes), total = used += size;
    if (capacity > 0 && total > capacity) {
      used -= size;
      TORCH_CHECK_WITH(OutOfMemoryError, false,
                       "simulated out of memory. Tried to allocate ", bytes, " bytes.");
    }
    for (int64_t seen = peak; seen < total && !peak.compare_exchange_weak(seen, total);) {}
    memory = std::malloc(bytes);
  }
  ~Block() {
    used -= static_cast<int64_t>(bytes);
    std::free(memory);
  }
};

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, device()};
    auto* block = new Block(bytes);
    return {block->memory, block, [](void* p) { delete static_cast<Block*>(p); }, device()};
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device to) const override {
    return device(std::exchange(current, to.index()));
  }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device to) const override { current = to.index(); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current = to.index(); }
  c10::Stream getStream(c10::Device of) const override {
    return c10::Stream(c10::Stream::DEFAULT, device(of.index()));
  }
  c10::Stream getDefaultStream(c10::Device of) const override { return getStream(of); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Other numbers than the CPU's from the same seed, as on any device.
struct Random final : c10::GeneratorImpl {
  uint64_t seed_;
  at::Generator host = at::detail::createCPUGenerator();

  explicit Random(c10::DeviceIndex index, uint64_t seed = c10::default_rng_seed_val)
      : GeneratorImpl(::device(index), KEYS) {
    set_current_seed(seed);
  }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    host.set_current_seed(~seed);
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offset"); }
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  Random* clone_impl() const override {
    auto* copy = new Random(device_.index(), seed_);
    copy->host = host.clone();
    return copy;
  }
};

const at::Generator& default_random(c10::DeviceIndex index = -1) {
  static at::Generator all[COUNT] = {at::make_generator<Random>(0), at::make_generator<Random>(1)};
  return all[index < 0 ? current : index];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex to) const override { current = to; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
    return std::exchange(current, to);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override {
    return exchangeDevice(to);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_random(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Random>(index);
  }
  c10::Device getDeviceFromPtr(void*) const override { return device(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

// ---- operations on the CPU's kernels ---------------------------------------------------------

bool on_device(const at::Tensor& t) { return t.defined() && t.device().type() == TYPE; }

struct Given {
  at::Tensor tensor;
  bool first, written;
};

std::vector<Given> tensors(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  std::vector<Given> all;
  const size_t n = schema.arguments().size();
  for (size_t i = 0; i < n; i++) {
    const auto& value = stack[stack.size() - n + i];
    const auto* alias = schema.arguments()[i].alias_info();
    auto add = [&](const at::Tensor& t) {
      if (t.defined()) all.push_back({t, all.empty(), alias && alias->isWrite()});
    };
    if (value.isTensor()) add(value.toTensor());
    else if (value.isTensorList()) for (const at::Tensor& t : value.toTensorVector()) add(t);
    else if (value.isOptionalTensorList())
      for (const auto& t : value.toOptionalTensorVector()) if (t) add(*t);
  }
  return all;
}

// As CUDA has it: a number on the CPU may meet tensors of the device entry by entry, and indices
// may come from the CPU. Returns the device, or none where all is on the CPU.
std::optional<c10::Device> one_device(const c10::FunctionSchema& schema,
                                      const std::vector<Given>& all) {
  auto name = c10::toString(schema.operator_name());
  bool index = indexing.count(name), loose = index || elementwise.count(name);
  auto known = std::find_if(all.begin(), all.end(), [](auto& g) { return on_device(g.tensor); });
  if (known == all.end()) return std::nullopt;
  auto own = known->tensor.device();
  for (const auto& [t, first, written] : all) {
    bool number = loose && t.dim() == 0 && !written && !on_device(t);
    bool indices = index && !first && !t.is_floating_point() && !on_device(t);
    TORCH_CHECK(t.device() == own || number || indices,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                own, " and ", t.device(), "! (", name, ")");
  }
  return own;
}

void take_generator(const c10::FunctionSchema& schema, torch::jit::Stack* stack) {
  const size_t n = schema.arguments().size();
  for (size_t i = 0; i < n; i++) {
    auto& value = (*stack)[stack->size() - n + i];
    if (schema.arguments()[i].type()->str() != "Generator?") continue;
    auto generator = value.isNone() ? default_random() : value.toGenerator();
    TORCH_CHECK(generator.device() == device(), "Expected a generator of ", device(), " but found one of ", generator.device());
    value = static_cast<Random*>(generator.unsafeGetGeneratorImpl())->host;
  }
}

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::OptionalDeviceGuard guard(one_device(op.schema(), tensors(op.schema(), *stack)));
  take_generator(op.schema(), stack);
  at::native::cpu_fallback(op, stack);
}

// Attention is written out, as where a device has no kernel for it.
void plain_attention(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  torch::jit::push(*stack, static_cast<int64_t>(0));
}

// ---- operations that are about memory --------------------------------------------------------

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<c10::Device> where, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(where);
  auto type = c10::dtype_or_default(dtype);
  require_dtype(type);
  return at::detail::empty_generic(size, &memory, KEYS, type, format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<c10::Device> where, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(where);
  auto type = c10::dtype_or_default(dtype);
  require_dtype(type);
  return at::detail::empty_strided_generic(size, stride, &memory, KEYS, type);
}

// The same memory as a tensor of the CPU.
at::Tensor host(const at::Tensor& t) {
  if (!on_device(t)) return t;
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (t.numel() == 0) return at::empty(t.sizes(), options);
  auto* data = static_cast<char*>(t.storage().mutable_data());
  auto view = at::from_blob(data + t.storage_offset() * t.itemsize(), t.sizes(), t.strides(),
                            [t](void*) {}, options);
  view._set_conj(t.is_conj());
  view._set_neg(t.is_neg());
  return view;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  host(to).copy_(host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& t) { return host(t).item(); }

at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->expect_int();
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef size,
                         c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(const at::Tensor& t, c10::SymIntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_strided(at::Tensor& t, at::Storage storage, c10::SymInt offset,
                        c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(t, std::move(storage), offset.expect_int(),
                                      C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(at::Tensor& t, at::Storage storage) {
  auto entries = static_cast<int64_t>(storage.nbytes() / t.itemsize());
  return at::native::set_storage_cpu_(t, std::move(storage), 0, {entries}, {});
}

at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& other) {
  return at::native::set_storage_cpu_(t, other.storage(), other.storage_offset(), other.sizes(),
                                      other.strides());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_strided);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("_fused_sdp_choice", torch::CppFunction::makeFromBoxedFunction<&plain_attention>());
  // These look for a kernel by the device's name, and know of no such one.
  for (const char* name : {"convolution", "convolution_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

void start(const std::vector<std::string>& loose, const std::vector<std::string>& index) {
  elementwise.insert(loose.begin(), loose.end());
  indexing.insert(index.begin(), index.end());
  c10::SetAllocator(TYPE, &memory);
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("start", &start);
  module.def("random", &default_random, pybind11::arg("index") = -1);
  module.def("current", [] { return static_cast<int>(current); });
  module.def("used", [] { return used.load(); });
  module.def("peak", [] { return peak.load(); });
  module.def("restart_peak", [] { peak = used.load(); });
  module.def("limit", [](int64_t bytes) { capacity = bytes; });
  module.def("allow_float64", [](bool allowed) { float64 = allowed; });
}
