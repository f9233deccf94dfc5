// Wrap the asynchronous instructions of Hopper (sm_90a): mbarriers, copies that arrive on them, and
// what a wgmma needs around it. The PTX ISA describes each under the name of its instruction.

#pragma once

#include "numeric.cuh"

using uint64 = unsigned long long;

__device__ __forceinline__ uint32 shared_address(const void* p) {
  return static_cast<uint32>(__cvta_generic_to_shared(p));
}

// --- mbarriers ---------------------------------------------------------------------------------------

// Each stage has two. `full` tells the consumers that its data has landed; `empty` tells the producer
// that the consumers have read it.

__device__ __forceinline__ void barrier_init(uint32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32 barrier) {
  asm volatile("{\n.reg .b64 t;\nmbarrier.arrive.shared::cta.b64 t, [%0];\n}" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32 barrier, uint32 parity) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\nbra again;\ndone:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- copies into shared memory -----------------------------------------------------------------------

__device__ __forceinline__ void copy16(uint32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Copies the first `bytes` of the 16, which are all or none, and writes zeros for the others.
__device__ __forceinline__ void copy16(uint32 to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// This thread arrives at the barrier as soon as the copies that it has started so far have landed.
__device__ __forceinline__ void copies_arrive(uint32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Makes what ordinary copies wrote visible to wgmma.
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- wgmma -------------------------------------------------------------------------------------------

// Describes a K-major operand in shared memory to wgmma. It lies in rows of 128 bytes under the 128-byte
// swizzle, whose pattern repeats after every 8 rows.
__device__ __forceinline__ uint64 swizzled_operand(uint32 address) {
  return static_cast<uint64>((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void warpgroup_sync(int warpgroup) {  // __syncthreads has barrier 0
  if (warpgroup == 0)
    asm volatile("bar.sync 1, 128;" ::: "memory");
  else
    asm volatile("bar.sync 2, 128;" ::: "memory");
}

// Waits, as one of two warpgroups, until the other one gives it the turn.
__device__ __forceinline__ void turn_wait(int warpgroup) {
  if (warpgroup == 0)
    asm volatile("bar.sync 3, 256;" ::: "memory");
  else
    asm volatile("bar.sync 4, 256;" ::: "memory");
}

__device__ __forceinline__ void turn_give(int warpgroup) {
  if (warpgroup == 0)
    asm volatile("bar.arrive 3, 256;" ::: "memory");
  else
    asm volatile("bar.arrive 4, 256;" ::: "memory");
}
