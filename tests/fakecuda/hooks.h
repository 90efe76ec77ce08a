// What the stub libraries above the driver (cublasLt, cuDNN, NCCL) ask of the stub driver.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

// Runs `task(data)` in the order of the stream, then `drop(data)` once no graph needs it any more. `library` and `name` are for counters
// and for FAKE_CUDA_FAIL. Returns a CUresult.
int fakecuda_enqueue(void* stream, const char* library, const char* name, void (*task)(void*), void (*drop)(void*), void* data);

// The device (index among the visible ones) of a stream, or of the calling thread's context; -1 without one.
int fakecuda_stream_device(void* stream);
int fakecuda_current_device();
// The index of a device on the machine, whatever CUDA_VISIBLE_DEVICES says.
int fakecuda_physical_device(int device);

// Whether [pointer, pointer + bytes) lies in one live allocation that `device` may use; says on stderr why not.
bool fakecuda_usable(int device, const void* pointer, size_t bytes, const char* who);

// The error that FAKE_CUDA_FAIL wants from this call of `kind`, or 0; the number is the library's own status.
int fakecuda_fault(const char* kind, int device);

// Whether cuDriverGetVersion is at least that of the libraries.
bool fakecuda_driver_is_new_enough();

// Fills memory with what uninitialised memory holds: not a number in f32, f16 and bf16.
void fakecuda_poison(void* memory, size_t bytes);
}
