# The spawner: rules included by Makefile (or run alone: make -f spawner.mk BUILD=…). libseccomp is needed to build, not to run.
BUILD ?= build
HOST_CC ?= gcc
MUSL_CC ?= musl-gcc
SPAWNER_CFLAGS ?= -std=c11 -O2 -g0 -static -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Wstrict-prototypes -Werror \
	-fstack-protector-strong -Wl,-z,noexecstack,-z,relro,-z,now -idirafter /usr/include -idirafter /usr/include/$(shell $(HOST_CC) -print-multiarch)
SECCOMP_LISTS := seccomp/allow.txt seccomp/guest.txt seccomp/refuse.txt seccomp/ptrace.txt
SPAWNER_SOURCES := spawner.c spawner_arguments.c spawn_parse.c sandbox_child.c data_mounts.c mounts.c places.c trees.c
SPAWNER_HEADERS := spawn.h spawner_arguments.h spawn_parse.h sandbox_child.h data_mounts.h mounts.h places.h trees.h groups.h no_clone3.h

.PHONY: all spawner
all: spawner
spawner: $(BUILD)/spawner

$(BUILD)/seccomp_generate: seccomp/generate.c seccomp/sockets.h
	@mkdir -p $(BUILD)
	$(HOST_CC) -std=c11 -O1 -Wall -Wextra -Werror $< -lseccomp -o $@

$(BUILD)/seccomp_filters.h: $(BUILD)/seccomp_generate $(SECCOMP_LISTS)
	$(BUILD)/seccomp_generate seccomp > $@.new
	mv $@.new $@

$(BUILD)/spawner: $(SPAWNER_SOURCES) $(SPAWNER_HEADERS) $(BUILD)/seccomp_filters.h
	$(MUSL_CC) $(SPAWNER_CFLAGS) -I$(BUILD) $(SPAWNER_SOURCES) -s -o $@

# The same under ASan and UBSan, for the host tests. Not static: the sanitizers need a shared C library.
$(BUILD)/spawner_sanitized: $(SPAWNER_SOURCES) $(SPAWNER_HEADERS) $(BUILD)/seccomp_filters.h
	$(HOST_CC) -std=c11 -O1 -g -Wall -Wextra -Werror -fsanitize=address,undefined -fno-sanitize-recover=all \
		-fno-omit-frame-pointer -I$(BUILD) $(SPAWNER_SOURCES) -o $@

# Programs that the host tests run inside a sandbox: static, so that they need nothing of an image.
SPAWNER_TEST_PROGRAMS := $(BUILD)/attack_pid1 $(BUILD)/probe_guest $(BUILD)/seccomp_answers $(BUILD)/show_ids $(BUILD)/hold_inotify \
	$(BUILD)/hold_memory $(BUILD)/hold_locks $(BUILD)/attack_kernel $(BUILD)/attack_search $(BUILD)/attack_trap
.PHONY: spawner-tests
spawner-tests: $(SPAWNER_TEST_PROGRAMS) $(BUILD)/spawner_sanitized

$(BUILD)/attack_kernel: tests/attack_table.h
$(SPAWNER_TEST_PROGRAMS): $(BUILD)/%: tests/%.c
	@mkdir -p $(BUILD)
	$(MUSL_CC) $(SPAWNER_CFLAGS) $< -s -o $@
