// K and V of new tokens and where they go.
#pragma once

#include "check.hpp"
#include "isa.hpp"
#include "layout.hpp"

namespace kvist {

// K and V of T tokens, and where they go; checked.
struct Fresh {
    char* pool;  // where the layer begins in block 0
    Element element;
    const Layout* layout;
    const char *key, *value;
    std::int64_t key_token, key_head, value_token, value_head;  // strides in bytes
    const std::int64_t* slots;
    std::int64_t tokens;
};

// Their pool is moved on to where a layer begins.
Fresh check_fresh(Sizes& sizes, nb::handle pool, const Layout& layout, std::int64_t layer, nb::handle key,
                  nb::handle value, nb::handle slots);

// One head's K and V of one token, into a head of a block.
void put(const Layout& layout, Element element, char* head, std::int64_t slot, const char* key, const char* value);

// The head of the block that a token goes into.
inline char* head_of(const Fresh& fresh, std::int64_t token, std::int64_t head) {
    const Layout& layout = *fresh.layout;
    const std::int64_t block = fresh.slots[token] / layout.block_size;
    return fresh.pool +
           (block * layout.block_elements() + head * layout.head_elements()) * element_bytes(fresh.element);
}

// A token's K and V of some heads.
void put_heads(const Fresh& fresh, std::int64_t token, std::int64_t first, std::int64_t last);
// All of them, shared out among threads.
void put_all(const Fresh& fresh);
// Asks for the memory that put_heads will write, when it is not needed yet.
void expect_heads(const Fresh& fresh, std::int64_t token, std::int64_t first, std::int64_t last);

}  // namespace kvist
