// The form of "PTX" and "cubins" here: one line of facts, then the shared object in base 64. Self-contained, so that a program may keep it.
#pragma once
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace fake {

inline std::string cache_folder() {
  const char* set = getenv("FAKE_CUDA_CACHE");
  std::string folder = set && *set ? set : "/tmp/fakecuda-" + std::to_string(getuid());
  mkdir(folder.c_str(), 0700);
  return folder;
}

inline std::string digest(const std::string& text) {
  uint64_t a = 0xcbf29ce484222325, b = 0x9E3779B97F4A7C15;  // FNV-1a, twice
  for (unsigned char c : text) {
    a = (a ^ c) * 0x100000001b3;
    b = (b + c) * 0x100000001b3 ^ (b >> 29);
  }
  char out[33];
  snprintf(out, sizeof out, "%016llx%016llx", (unsigned long long)a, (unsigned long long)b);
  return out;
}

struct Image {
  bool is_ptx = true;
  int arch = 0, nvrtc_major = 0;
  std::string sum, object;

  std::string text() const {
    static const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string out = std::string("//FAKECUDA ") + (is_ptx ? "ptx" : "cubin") + " " + std::to_string(arch) + " " + std::to_string(nvrtc_major) + " " + digest(object) + "\n";
    unsigned bits = 0;
    int held = 0;
    for (unsigned char c : object) {
      bits = bits << 8 | c;
      for (held += 8; held >= 6; held -= 6) out += digits[bits >> (held - 6) & 63];
    }
    if (held) out += digits[bits << (6 - held) & 63];
    return out + "\n";
  }

  bool parse(const char* text) {
    char kind[8], hash[40];
    int used = 0;
    if (strncmp(text, "//FAKECUDA ", 11) || sscanf(text, "//FAKECUDA %7s %d %d %39s%n", kind, &arch, &nvrtc_major, hash, &used) != 4) return false;
    is_ptx = !strcmp(kind, "ptx");
    sum = hash;
    unsigned bits = 0;
    int held = 0;
    for (const char* c = text + used + 1;; c++) {
      int digit = *c >= 'A' && *c <= 'Z' ? *c - 'A' : *c >= 'a' && *c <= 'z' ? *c - 'a' + 26 : *c >= '0' && *c <= '9' ? *c - '0' + 52 : *c == '+' ? 62 : *c == '/' ? 63 : -1;
      if (digit < 0) break;
      bits = bits << 6 | unsigned(digit);
      if ((held += 6) >= 8) {
        held -= 8;
        object += char(bits >> held & 255);
      }
    }
    return digest(object) == sum;
  }
};

}  // namespace fake
