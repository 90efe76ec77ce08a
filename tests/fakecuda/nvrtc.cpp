// A stub NVRTC: g++ compiles the kernels, with include/fakecuda_kernel.h in front, to a shared object that the stub driver loads.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <fstream>
#include <regex>
#include <sstream>
#include <vector>

#include "image.h"

#define API extern "C" __attribute__((visibility("default")))
using fake::Image;

enum Result { SUCCESS = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4, INVALID_OPTION = 5, COMPILATION = 6, INTERNAL_ERROR = 11 };

struct Program {
  std::string source, name, log;
  bool compiled = false, has_cubin = false;
  Image image;
  std::string ptx, cubin;
};

static std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}
static std::string here() {
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&here), &info);
  char* real = realpath(info.dli_fname, nullptr);
  std::string path = real ? real : info.dli_fname;
  free(real);
  return path.substr(0, path.rfind('/'));
}
static std::string quoted(const std::string& text) {
  std::string out = "'";
  for (char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

struct Options {
  int arch = FAKE_CUDA_MAJOR >= 13 ? 75 : 52;
  bool real_arch = false;       // sm_XX: there is a cubin
  std::vector<std::string> gcc;  // what g++ has to know
  std::string error;
};

// The options that NVRTC documents and kernels could want; anything else is refused, as NVRTC does.
static Options parse(int count, const char* const* texts) {
  static const std::vector<std::string> ignored = {
      "--device-as-default-execution-space", "-default-device", "--use_fast_math", "-use_fast_math", "--fmad", "-fmad", "--ftz", "-ftz", "--prec-div", "-prec-div",
      "--prec-sqrt", "-prec-sqrt", "--maxrregcount", "-maxrregcount", "--generate-line-info", "-lineinfo", "--device-debug", "-G", "--restrict", "-restrict",
      "--extra-device-vectorization", "-extra-device-vectorization", "--disable-warnings", "-w", "--dopt", "-dopt", "--ptxas-options", "-Xptxas",
      "--diag-suppress", "-diag-suppress", "--std", "-std", "--split-compile", "--minimal", "--no-cache", "-no-cache", "--pch", "--relocatable-device-code"};
  static const std::vector<int> archs = FAKE_CUDA_MAJOR >= 13 ? std::vector<int>{75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121}
                                                              : std::vector<int>{50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90, 100, 103, 120, 121};
  Options options;
  for (int i = 0; i < count; i++) {
    std::string text = texts[i], value;
    if (text.compare(0, 2, "-D") == 0 || text.compare(0, 2, "-I") == 0 || text.compare(0, 2, "-U") == 0) {
      if (text.size() == 2 && i + 1 < count) text += texts[++i];
      options.gcc.push_back(text);
      continue;
    }
    size_t equals = text.find('=');
    std::string key = text.substr(0, equals);
    if (equals != std::string::npos) value = text.substr(equals + 1);
    bool takes_next = key == "-arch" || key == "--gpu-architecture" || key == "-Xptxas" || key == "--define-macro" || key == "--include-path";
    if (equals == std::string::npos && takes_next && i + 1 < count) value = texts[++i];
    if (key == "-arch" || key == "--gpu-architecture") {
      std::smatch match;
      bool known = std::regex_match(value, match, std::regex("(sm|compute|lto)_([0-9]+)[af]?"));
      if (known) known = std::find(archs.begin(), archs.end(), options.arch = std::stoi(match[2])) != archs.end();
      if (!known) options.error = "nvrtc: error: invalid value for --gpu-architecture (-arch)\n";
      options.real_arch = known && match[1] == "sm";
    } else if (key == "--define-macro") {
      options.gcc.push_back("-D" + value);
    } else if (key == "--include-path") {
      options.gcc.push_back("-I" + value);
    } else if (std::find(ignored.begin(), ignored.end(), key) == ignored.end()) {
      options.error = "nvrtc: error: unrecognized option " + text + " found\n";
    }
  }
  return options;
}

// Runs a command; its standard error is added to `log`, its standard output returned.
static bool run(const std::string& command, std::string* output, std::string* log, const std::string& scratch) {
  FILE* pipe = popen((command + " 2>" + quoted(scratch)).c_str(), "r");
  if (!pipe) return false;
  char part[4096];
  for (size_t n; (n = fread(part, 1, sizeof part, pipe)) > 0;) output->append(part, n);
  bool fine = pclose(pipe) == 0;
  *log += read(scratch);
  unlink(scratch.c_str());
  return fine;
}

struct Found {
  std::string name, bounds;
};

// The kernels of preprocessed source that can be found by their plain names: those with C linkage.
static std::vector<Found> kernels_of(const std::string& source) {
  static const std::regex kernel(
      R"re((extern\s*"C"\s*)?(?:static\s+|inline\s+)?__global__\s+((?:__launch_bounds__\s*\([^()]*(?:\([^()]*\)[^()]*)*\)\s*)?)void\s+((?:__launch_bounds__\s*\([^()]*(?:\([^()]*\)[^()]*)*\)\s*)?)([A-Za-z_]\w*)\s*\()re");
  static const std::regex block(R"re(extern\s*"C"\s*\{)re");
  std::vector<Found> found;
  for (std::sregex_iterator i(source.begin(), source.end(), kernel), end; i != end; ++i) {
    std::string before = source.substr(0, size_t(i->position()));
    bool c_linkage = (*i)[1].matched || std::regex_search(before, block);
    size_t last = before.find_last_not_of(" \t\n");
    if (last != std::string::npos && before[last] == '>') continue;  // a template
    if (!c_linkage) continue;
    std::string bounds = (*i)[2].length() ? (*i)[2] : (*i)[3];
    if (!bounds.empty()) bounds = bounds.substr(bounds.find('(') + 1, bounds.rfind(')') - bounds.find('(') - 1);
    found.push_back({(*i)[4], bounds});
  }
  return found;
}

// `extern __shared__ T name[];` names the memory that the launch asked for.
static std::string with_dynamic_shared(const std::string& source) {
  static const std::regex declaration(R"(extern\s+__shared__\s+((?:__align__\s*\(\s*\d+\s*\)\s*|alignas\s*\(\s*\d+\s*\)\s*)?)([\w:<> ]*[\w>])\s+(\w+)\s*\[\s*\]\s*;)");
  return std::regex_replace(source, declaration, "$2* const $3 = static_cast<$2*>(fakecuda_thread.dynamic_shared);");
}

API int nvrtcCreateProgram(Program** program, const char* source, const char* name, int headers, const char* const*, const char* const*) {
  if (!source) return INVALID_INPUT;
  if (headers) return INVALID_INPUT;  // no kernel of ours has any
  *program = new Program;
  (*program)->source = source;
  (*program)->name = name ? name : "default_program";
  return SUCCESS;
}
API int nvrtcDestroyProgram(Program** program) {
  if (!program || !*program) return INVALID_PROGRAM;
  delete *program;
  *program = nullptr;
  return SUCCESS;
}

static bool fault_wanted() {
  // The driver may not be loaded yet, so this library keeps count itself.
  static unsigned calls = 0;
  calls++;
  const char* wanted = getenv("FAKE_CUDA_FAIL");
  const char* at = wanted ? strstr(wanted, "compile:") : nullptr;
  return at && unsigned(atoi(at + 8)) == calls;
}

API int nvrtcCompileProgram(Program* program, int count, const char* const* texts) {
  if (!program) return INVALID_PROGRAM;
  program->log.clear();
  Options options = parse(count, texts);
  if (!options.error.empty()) {
    program->log = options.error;
    return INVALID_OPTION;
  }
  if (fault_wanted()) {
    program->log = program->name + "(1): error: FAKE_CUDA_FAIL wants this compilation to fail\n\n1 error detected in the compilation of \"" + program->name + "\".\n";
    return COMPILATION;
  }
  const char* asan = getenv("FAKE_CUDA_ASAN");
  bool sanitized = asan && *asan == '1';
  std::string include = here() + "/include";
  std::string flags = "-std=c++17 -D__CUDACC__ -D__CUDACC_RTC__ -DFAKECUDA_SANITIZED=" + std::to_string(sanitized);
  for (const std::string& option : options.gcc) flags += " " + quoted(option);
  std::string optimise = sanitized ? "-O1 -g -fno-omit-frame-pointer -fsanitize=address,alignment -fsanitize-undefined-trap-on-error" : "-O2";
  std::string key = fake::digest(program->source + "\n" + program->name + "\n" + flags + optimise + std::to_string(options.arch) + read(include + "/fakecuda_kernel.h") +
                                 read(include + "/fakecuda_thread.h"));
  std::string base = fake::cache_folder() + "/" + key, object = base + ".so";
  // Of several processes that want the same kernels one compiles.
  int lock = open((base + ".lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (lock < 0) {
    program->log = "fakecuda: cannot write to " + base + "\n";
    return INTERNAL_ERROR;
  }
  flock(lock, LOCK_EX);
  bool fine = access(object.c_str(), R_OK) == 0;
  if (!fine) {
    std::string preprocessed, ignored;
    std::ofstream(base + ".cu") << "# 1 \"" << program->name << "\"\n" << program->source << "\n";
    fine = run("g++ -E -x c++ " + flags + " " + quoted(base + ".cu"), &preprocessed, &program->log, base + ".log");
    if (fine) {
      std::ofstream out(base + ".cpp");
      out << "#include \"fakecuda_kernel.h\"\n" << with_dynamic_shared(preprocessed) << "\n# 1 \"table of kernels\"\n";
      out << "extern \"C\" { extern const unsigned char fakecuda_sanitized; const unsigned char fakecuda_sanitized = FAKECUDA_SANITIZED;\n"
             "extern const fakecuda::Kernel fakecuda_kernels[]; const fakecuda::Kernel fakecuda_kernels[] = {\n";
      for (const Found& kernel : kernels_of(preprocessed)) out << "  FAKECUDA_KERNEL(" << kernel.name << (kernel.bounds.empty() ? "" : ", ") << kernel.bounds << "),\n";
      out << "  {nullptr, nullptr, 0, nullptr, nullptr, 0}}; }\n";
      out.close();
      std::string part = base + ".part.so";
      fine = run("g++ " + flags + " " + optimise + " -march=native -ffp-contract=fast -fno-strict-aliasing -fno-math-errno -fPIC -shared -w -fpermissive -I" + quoted(include) + " -o " +
                     quoted(part) + " " + quoted(base + ".cpp") + " " + quoted(here() + "/libcuda.so.1"),
                 &ignored, &program->log, base + ".log") &&
             rename(part.c_str(), object.c_str()) == 0;
    }
  }
  close(lock);
  if (!fine) {
    program->log += "\n1 error detected in the compilation of \"" + program->name + "\".\n";
    return COMPILATION;
  }
  program->image = {true, options.arch, FAKE_CUDA_MAJOR, "", read(object)};
  program->ptx = program->image.text();
  program->has_cubin = options.real_arch;
  program->image.is_ptx = false;
  program->cubin = options.real_arch ? program->image.text() : "";
  program->compiled = true;
  return SUCCESS;
}

API int nvrtcGetPTXSize(Program* program, size_t* bytes) {
  if (!program || !program->compiled) return INVALID_PROGRAM;
  *bytes = program->ptx.size() + 1;
  return SUCCESS;
}
API int nvrtcGetPTX(Program* program, char* out) {
  if (!program || !program->compiled) return INVALID_PROGRAM;
  memcpy(out, program->ptx.c_str(), program->ptx.size() + 1);
  return SUCCESS;
}
API int nvrtcGetCUBINSize(Program* program, size_t* bytes) {
  if (!program || !program->compiled) return INVALID_PROGRAM;
  *bytes = program->cubin.size();  // 0 for a virtual architecture
  return SUCCESS;
}
API int nvrtcGetCUBIN(Program* program, char* out) {
  if (!program || !program->compiled || !program->has_cubin) return INVALID_PROGRAM;
  memcpy(out, program->cubin.data(), program->cubin.size());
  return SUCCESS;
}
API int nvrtcGetProgramLogSize(Program* program, size_t* bytes) {
  *bytes = program->log.size() + 1;
  return SUCCESS;
}
API int nvrtcGetProgramLog(Program* program, char* out) {
  memcpy(out, program->log.c_str(), program->log.size() + 1);
  return SUCCESS;
}
API int nvrtcVersion(int* major, int* minor) {
  *major = FAKE_CUDA_MAJOR;
  *minor = 0;
  return SUCCESS;
}
API int nvrtcGetNumSupportedArchs(int* count) {
  *count = 6;
  return SUCCESS;
}
API int nvrtcGetSupportedArchs(int* archs) {
  const int all[] = {75, 80, 86, 90, 100, 120};
  std::copy(std::begin(all), std::end(all), archs);
  return SUCCESS;
}
API const char* nvrtcGetErrorString(int result) {
  switch (result) {
    case SUCCESS: return "NVRTC_SUCCESS";
    case INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
    case INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
    case INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
    case COMPILATION: return "NVRTC_ERROR_COMPILATION";
    default: return "NVRTC_ERROR_INTERNAL_ERROR";
  }
}
