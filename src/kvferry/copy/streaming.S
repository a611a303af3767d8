# The source of the machine code in streaming.py; tests/copy/test_host_copier.py assembles it and compares.
#
#   void stream_rows(const struct row {uint64 dst, src, nbytes;} *rows, uint64 count)        System V x86-64, SSE2 only
#
# Stores go past the caches, so that the processor need not first read the lines that it is about to overwrite: what
# the C library's memcpy does for single copies of many MiB, here for many rows of any size. Four pages are copied
# abreast, all loads of a step before its stores (a load whose low 12 address bits match a pending store would wait).
# Bytes before the first 16-byte boundary of the target and after the last whole line go by `rep movsb`.
# The first lines of the pages that come next, in this row or the following one, are asked for ahead.
    .intel_syntax noprefix
    .text
    mov r10, rdi
    mov r11, rsi
    test r11, r11
    jz done
row:
    mov rdi, [r10]
    mov rsi, [r10+8]
    mov rdx, [r10+16]
    mov rcx, rdi
    neg rcx
    and ecx, 15
    cmp rcx, rdx
    cmova rcx, rdx
    sub rdx, rcx
    rep movsb
pages:
    cmp rdx, 16384
    jb lines
    mov r9, rsi
    cmp r11, 1
    je last_row
    mov r9, [r10+32]
last_row:
    lea r8, [rsi+16384]
    cmp rdx, 32768
    cmovae r9, r8            # what comes next in this row, else the next row's source
    mov eax, 64
    prefetcht0 [r9]
    prefetcht0 [r9+4096]
    prefetcht0 [r9+8192]
    prefetcht0 [r9+12288]
abreast:
    movdqu xmm0, [rsi+0]
    movdqu xmm1, [rsi+16]
    movdqu xmm2, [rsi+32]
    movdqu xmm3, [rsi+48]
    movdqu xmm4, [rsi+4096]
    movdqu xmm5, [rsi+4112]
    movdqu xmm6, [rsi+4128]
    movdqu xmm7, [rsi+4144]
    movdqu xmm8, [rsi+8192]
    movdqu xmm9, [rsi+8208]
    movdqu xmm10, [rsi+8224]
    movdqu xmm11, [rsi+8240]
    movdqu xmm12, [rsi+12288]
    movdqu xmm13, [rsi+12304]
    movdqu xmm14, [rsi+12320]
    movdqu xmm15, [rsi+12336]
    movntdq [rdi+0], xmm0
    movntdq [rdi+16], xmm1
    movntdq [rdi+32], xmm2
    movntdq [rdi+48], xmm3
    movntdq [rdi+4096], xmm4
    movntdq [rdi+4112], xmm5
    movntdq [rdi+4128], xmm6
    movntdq [rdi+4144], xmm7
    movntdq [rdi+8192], xmm8
    movntdq [rdi+8208], xmm9
    movntdq [rdi+8224], xmm10
    movntdq [rdi+8240], xmm11
    movntdq [rdi+12288], xmm12
    movntdq [rdi+12304], xmm13
    movntdq [rdi+12320], xmm14
    movntdq [rdi+12336], xmm15
    add rsi, 64
    add rdi, 64
    dec eax
    jnz abreast
    add rsi, 12288
    add rdi, 12288
    sub rdx, 16384
    jmp pages
lines:
    cmp rdx, 64
    jb rest
    movdqu xmm0, [rsi]
    movdqu xmm1, [rsi+16]
    movdqu xmm2, [rsi+32]
    movdqu xmm3, [rsi+48]
    movntdq [rdi], xmm0
    movntdq [rdi+16], xmm1
    movntdq [rdi+32], xmm2
    movntdq [rdi+48], xmm3
    add rsi, 64
    add rdi, 64
    sub rdx, 64
    jmp lines
rest:
    mov rcx, rdx
    rep movsb
    add r10, 24
    dec r11
    jnz row
done:
    sfence
    ret
